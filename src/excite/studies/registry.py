"""All studies, in the order in which `excite study list` shows them. A new study is one import here."""

# ruff: noqa: F401
# isort: skip_file

from __future__ import annotations

from excite.studies.excitation.margin_losses import STUDY as margin_losses
from excite.studies.excitation.margin_radii import STUDY as margin_radii
from excite.studies.excitation.margin_layers import STUDY as margin_layers
from excite.studies.beyond.margin_auto import STUDY as margin_auto
from excite.studies.beyond.digits_auto import STUDY as digits_auto
from excite.studies.beyond.ten_classes import STUDY as ten_classes
from excite.studies.beyond.robust_overfitting import STUDY as robust_overfitting
from excite.studies.beyond.robust_layers import STUDY as robust_layers
from excite.studies.beyond.few_images import STUDY as few_images
from excite.studies.excitation.boundaries import STUDY as boundaries
from excite.studies.excitation.linear_margin import STUDY as linear_margin
from excite.studies.excitation.linear_rank import STUDY as linear_rank
from excite.studies.excitation.step_size import STUDY as step_size
from excite.studies.excitation.regularization import STUDY as regularization
from excite.studies.richness.hidden_rank import STUDY as hidden_rank
from excite.studies.richness.random_perturbations import STUDY as random_perturbations
from excite.studies.richness.all_layer_gap import STUDY as all_layer_gap
from excite.studies.excitation.perturbation_sets import STUDY as perturbation_sets
from excite.studies.excitation.class_targets import STUDY as class_targets
from excite.studies.excitation.excitation_basics import STUDY as excitation_basics
from excite.studies.trajectory.frequency import STUDY as frequency
from excite.studies.trajectory.corruption import STUDY as corruption
from excite.studies.trajectory.regions import STUDY as regions
from excite.studies.trajectory.dropout import STUDY as dropout
from excite.studies.trajectory.depth import STUDY as depth
from excite.studies.trajectory.architecture import STUDY as architecture
from excite.studies.trajectory.batch_size import STUDY as batch_size
from excite.studies.trajectory.all_biases import STUDY as all_biases
from excite.studies.beyond.optimizers import STUDY as optimizers
from excite.studies.beyond.weight_decay import STUDY as weight_decay
from excite.studies.beyond.spikes import STUDY as spikes
from excite.studies.beyond.backdoor import STUDY as backdoor
from excite.studies.beyond.consequences import STUDY as consequences
from excite.studies.invariances.conservation import STUDY as conservation
from excite.studies.invariances.low_rank import STUDY as low_rank
from excite.studies.invariances.reduced_alignment import STUDY as reduced_alignment
from excite.studies.invariances.image_alignment import STUDY as image_alignment
from excite.studies.invariances.decomposition import STUDY as decomposition
from excite.studies.invariances.conservation_real import STUDY as conservation_real
from excite.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in list(globals().values()) if isinstance(study, Study)}
"""All studies of Excite by name, in the order of `excite study list`."""
