"""The keys of the config of a training.

Types are strict (the text "false" is not a boolean, 2.5 is not a number of epochs), unknown keys are refused.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Number = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


def _norm_name(norm: object) -> object:
    """Norms may be numbers: 2 is "2"."""
    numbers: dict[object, str] = {1: "1", 2: "2", math.inf: "inf"}
    return numbers.get(norm, norm) if isinstance(norm, int | float) and not isinstance(norm, bool) else norm


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataConfig(_Section):
    """Which points: see `excite.data.load`.

    Attributes:
        name: Name of a dataset, such as "digits" or "cifar10".
        classes: Classes to keep, by number or name. Default: all.
        train: Number of training points. Default: all.
        test: Number of test points. Default: all.
        seed: Seed of the choice of points.
        scale: Smallest and largest value of the inputs.
        options: Options of a synthetic dataset.
        label_noise: Fraction of the training labels replaced by random ones, drawn with `seed`.

    Example:
        >>> DataConfig(name="digits", classes=[8, 9]).scale
        [-1.0, 1.0]
    """

    name: str
    classes: list[int | str] | None = None
    train: Count | None = None
    test: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    scale: Annotated[list[Number], Field(min_length=2, max_length=2)] = [-1.0, 1.0]
    options: dict[str, Number] = {}
    label_noise: Annotated[float, Field(ge=0, le=1)] = 0.0


class ModelConfig(_Section):
    """A built-in name ("small-cnn", "papers-cnn", "resnet", "preact-resnet", "vit", "mlp", "linear") or "module:factory", with options for it.

    Options that follow from the data (channels, inputs, size, outputs) are filled in for built-in names. `sharded`: where several
    processes train, each keeps a part of the weights (FSDP2) instead of all of them (DistributedDataParallel).

    Attributes:
        name: Built-in name or "module:factory".
        options: Keyword arguments of the factory.
        sharded: Whether weights are sharded across processes.

    Example:
        >>> ModelConfig(name="mlp", options={"widths": [32, 32]}).sharded
        False
    """

    name: str
    options: dict[str, Any] = {}
    sharded: bool = False


class ExcitationConfig(_Section):
    """Persistent excitation: give `radius` (a number, a table by layer, or "auto") or `relative` (times the layer's RMS).

    Attributes:
        radius: Radius, radius by layer, or "auto".
        relative: Radius as a multiple of the root mean square of each layer's input, instead of `radius`.
        norm: "inf", "2" or "1".
        steps: Steps of the search.
        layers: "all", "input" or names of layers.
        kind: "additive" or "multiplicative".
        stages: Number of stages in which the radius grows to its value. Default: constant.
        bounds: Smallest and largest value of the perturbed input.
        threshold: Class 1 where the output is above it.

    Example:
        >>> ExcitationConfig(radius=0.03, stages=4).layers
        'all'
    """

    radius: Literal["auto"] | NotNegative | dict[str, NotNegative] | None = None
    relative: Positive | None = None
    norm: Annotated[Literal["inf", "2", "1"], BeforeValidator(_norm_name)] = "inf"
    steps: Count = 4
    layers: Literal["all", "input"] | list[str] = "all"
    kind: Literal["additive", "multiplicative"] = "additive"
    stages: Annotated[int, Field(ge=2)] | None = None
    bounds: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    threshold: Number = 0.5

    @model_validator(mode="after")
    def _one_radius(self) -> ExcitationConfig:
        if (self.radius is None) == (self.relative is None):
            raise ValueError("either radius or relative")
        return self


class AdversarialConfig(_Section):
    """Adversarial training: the input, and with `hidden_radius` hidden layers too, perturbed up the loss.

    The keys are the arguments of `excite.AdversarialTraining`, whose documentation explains them.

    Attributes:
        radius: Radius at the input.
        hidden_radius: Relative radius at the inputs of hidden layers, by layer, or "auto".
        held_out: Number of training points that are not trained on, for hidden_radius = "auto".

    Example:
        >>> AdversarialConfig(radius=8 / 255, steps=10).random_start
        True
    """

    radius: NotNegative
    norm: Annotated[Literal["inf", "2", "1"], BeforeValidator(_norm_name)] = "inf"
    steps: Count = 7
    step_size: Positive | None = None
    random_start: bool = True
    stages: Annotated[int, Field(ge=2)] | None = None
    bounds: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    layers: Literal["all"] | list[str] = "all"
    hidden_radius: Literal["auto"] | NotNegative | dict[str, NotNegative] = 0.0
    hidden_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0  # of each batch, the samples with the smallest error
    hidden_norm: Annotated[Literal["inf", "2"], BeforeValidator(_norm_name)] = "inf"
    hidden_budget: Literal["layer", "shared"] = "layer"
    hidden_random_start: bool = False
    hidden_once: bool = False  # hidden layers move in the last step of the search alone
    hidden_stages: Annotated[int, Field(ge=2)] | None = None  # of hidden_radius: with 2 it begins at half of training
    held_out: Count | None = None  # training points that are not trained on, for hidden_radius = "auto"
    gap_target: Positive = 0.08
    gap_every: Count = 25
    awp: NotNegative = 0.0
    trades: NotNegative = 0.0
    keep_best: bool = False
    free: bool = False  # an update of the weights after every step of the search

    @model_validator(mode="after")
    def _options_fit(self) -> AdversarialConfig:
        shared, once = self.hidden_budget == "shared", self.hidden_once
        if (shared and self.hidden_norm != "2") or ((shared or once) and self.hidden_random_start):
            raise ValueError(
                "hidden_budget = 'shared' with hidden_norm = '2'; it and hidden_once without hidden_random_start"
            )
        if self.free and (self.awp > 0 or self.keep_best or self.hidden_once):
            raise ValueError("free without awp, keep_best and hidden_once, which need a search")
        return self

    @model_validator(mode="after")
    def _held_out_for_auto(self) -> AdversarialConfig:
        if (self.hidden_radius == "auto") != (self.held_out is not None):
            raise ValueError(
                "held_out, the number of training points to hold out, together with hidden_radius = 'auto'"
            )
        if (
            self.hidden_stages is not None
            and not isinstance(self.hidden_radius, dict)
            and self.hidden_radius in ("auto", 0)
        ):
            raise ValueError("hidden_radius above 0, not 'auto', together with hidden_stages")
        return self


class RobustConfig(_Section):
    """Robust accuracy before training, every `every` epochs and after the last: an attack on `points` points of each part.

    Attributes:
        radius: Radius of the attack.
        norm: "inf", "2" or "1".
        steps: Steps of the attack.
        points: Number of points of the training and of the test data.
        every: Epochs between two measurements.
        bounds: Smallest and largest value of the inputs.
        save_best: Whether to store the weights of the epoch with the highest robust accuracy on test data, as
            artifacts/best.safetensors. That accuracy is optimistic, since the epoch is chosen on the same points.

    Example:
        >>> RobustConfig(radius=8 / 255).every
        1
    """

    radius: Positive
    norm: Annotated[Literal["inf", "2", "1"], BeforeValidator(_norm_name)] = "inf"
    steps: Count = 10
    points: Count = 1000
    every: Count = 1
    bounds: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    save_best: bool = False


class SGDConfig(_Section):
    """Settings of torch.optim.SGD.

    Attributes:
        name: "sgd".
        lr: Learning rate.
        momentum: As in torch.optim.SGD.
        dampening: As in torch.optim.SGD.
        weight_decay: As in torch.optim.SGD.
        nesterov: As in torch.optim.SGD.
        momentum_start: What the momentum buffer starts from: "gradient", the first gradient, as in PyTorch, or "zero", as in
            Algorithm 1.

    Example:
        >>> SGDConfig(lr=0.1, momentum=0.9).momentum_start
        'gradient'
    """

    name: Literal["sgd"] = "sgd"
    lr: Positive
    momentum: NotNegative = 0.0
    dampening: Number = 0.0
    weight_decay: NotNegative = 0.0
    nesterov: bool = False
    momentum_start: Literal["gradient", "zero"] = "gradient"

    @model_validator(mode="after")
    def _momentum_to_start(self) -> SGDConfig:
        if self.momentum_start == "zero" and not self.momentum:
            raise ValueError("momentum > 0 together with momentum_start = 'zero'")
        return self


class AdamConfig(_Section):
    """Settings of torch.optim.Adam and AdamW.

    Attributes:
        name: "adam" or "adamw".
        lr: Learning rate.
        betas: As in torch.optim.Adam.
        eps: As in torch.optim.Adam.
        weight_decay: As in torch.optim.Adam.

    Example:
        >>> AdamConfig(name="adamw").lr
        0.001
    """

    name: Literal["adam", "adamw"]
    lr: Positive = 1e-3
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0


class AugmentConfig(_Section):
    """Random changes of every batch of images: see `excite.train.batches.augmented`.

    Attributes:
        flip: Whether images are mirrored at random.
        shift: Largest shift in pixels.

    Example:
        >>> AugmentConfig(flip=False).shift
        4
    """

    flip: bool = True
    shift: Annotated[int, Field(ge=0)] = 4

    @model_validator(mode="after")
    def _changes_something(self) -> AugmentConfig:
        if not self.flip and not self.shift:
            raise ValueError("flip = true or a shift of at least 1, else nothing is augmented")
        return self


class TrainConfig(_Section):
    """One training. Without `excitation` and `adversarial` it is plain.

    The model has one output for two classes and squared error, else one for each class.

    Attributes:
        data: Dataset.
        model: Model.
        loss: "squared" or "cross-entropy".
        excitation: Settings of persistent excitation.
        adversarial: Settings of adversarial training.
        augment: Random changes of the images.
        optimizer: Optimizer.
        robust: Robust accuracy along the training.
        schedule: Schedule of the learning rate (`excite.train.schedule`).
        precision: Precision of the passes; weights stay in float32.
        epochs: Number of epochs.
        batch: Batch size.
        seed: Seed of the weights and of the order of the points.
        device: "cpu", "cuda" or "auto".
        checkpoint_every: Steps or epochs between checkpoints, as 100 or "2 epochs".
        keep: Number of checkpoints beside the final one.
        watch: Whether probes run; a number: steps between measurements.

    Example:
        >>> from excite.train.config import parse_config
        >>> config = parse_config({"data": {"name": "digits"}, "model": {"name": "mlp"}, "optimizer": {"name": "sgd", "lr": 0.1},
        ...                        "epochs": 2, "batch": 20})
        >>> config.loss
        'squared'
    """

    data: DataConfig
    model: ModelConfig
    loss: Literal["squared", "cross-entropy"] = "squared"
    excitation: ExcitationConfig | None = None
    adversarial: AdversarialConfig | None = None
    augment: AugmentConfig | None = None
    optimizer: Annotated[SGDConfig | AdamConfig, Field(discriminator="name")]
    robust: RobustConfig | None = None
    schedule: Literal["constant", "one-cycle", "step"] = "constant"  # of the learning rate: see `excite.train.schedule`
    precision: Literal["float32", "bfloat16"] = "float32"  # of the passes; weights stay in float32
    epochs: Count
    batch: Count
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    checkpoint_every: Count | Annotated[str, Field(pattern=r"^[1-9]\d* (step|epoch)s?$")] = "1 epoch"
    keep: Count = 2  # checkpoints beside the final one
    watch: bool | Count = True

    @model_validator(mode="after")
    def _one_method(self) -> TrainConfig:
        if self.excitation is not None and self.adversarial is not None:
            raise ValueError("either excitation or adversarial")
        return self
