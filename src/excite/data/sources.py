"""Where downloaded sets come from, and what every byte of them must be.

Each final file has its own SHA-256: that is what counts. The archives have theirs too, so that nothing is unpacked that
is not what its authors published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file as it lies in the cache folder."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Archive:
    """A file to download: a .tar.gz with `files` under `prefix`, or a .gz that is one file."""

    url: str
    sha256: str
    files: tuple[File, ...]
    prefix: str = ""

    @property
    def name(self) -> str:
        """File name of the archive."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """A set: the folder its files lie in, and the archives they come from."""

    name: str
    folder: str
    archives: tuple[Archive, ...]

    @property
    def files(self) -> tuple[File, ...]:
        """All files of the set."""
        return tuple(file for archive in self.archives for file in archive.files)


# Name and size of the four files of MNIST, and of sets in its format.
_IDX_FILES = (
    ("train-images-idx3-ubyte", 47040016),
    ("train-labels-idx1-ubyte", 60008),
    ("t10k-images-idx3-ubyte", 7840016),
    ("t10k-labels-idx1-ubyte", 10008),
)


def _idx_source(name: str, url: str, hashes: Sequence[tuple[str, str]]) -> Source:
    """A set in MNIST's format below an address; `hashes` are the SHA-256 of each file, compressed and unpacked."""
    return Source(
        name,
        name,
        tuple(
            Archive(f"{url}/{file}.gz", compressed, (File(file, size, unpacked),))
            for (file, size), (compressed, unpacked) in zip(_IDX_FILES, hashes, strict=True)
        ),
    )


SOURCES: dict[str, Source] = {
    "cifar10": Source(
        "cifar10",
        "cifar-10-batches-bin",
        (
            Archive(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                (
                    File("data_batch_1.bin", 30730000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
                    File("data_batch_2.bin", 30730000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
                    File("data_batch_3.bin", 30730000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
                    File("data_batch_4.bin", 30730000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
                    File("data_batch_5.bin", 30730000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
                    File("test_batch.bin", 30730000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
                ),
                prefix="cifar-10-batches-bin/",
            ),
        ),
    ),
    "mnist": _idx_source(
        "mnist",
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        (
            ("440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
            ("3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
            ("8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
            ("f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
        ),
    ),
    "fashion-mnist": _idx_source(
        "fashion-mnist",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        (
            ("3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84", "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"),
            ("a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845", "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"),
            ("346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073", "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"),
            ("67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5", "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"),
        ),
    ),
}  # fmt: skip
