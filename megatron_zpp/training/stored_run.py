"""The run that this one goes on from, as the manifest of its checkpoint tells of it: what is taken, and whether it fits (no torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_zpp.checkpoint.contents import check_model, check_moments, rotation_differences
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.config.schema import CheckpointConfig, Config
from megatron_zpp.parallel.specs import UnitSpec


@dataclass(frozen=True)
class StoredRun:
    """weights_only: nothing but weights is taken from it."""

    folder: Path
    manifest: Manifest
    weights_only: bool

    @staticmethod
    def of(checkpoint: CheckpointConfig, folder: Path, manifest: Manifest) -> StoredRun:
        """What the flags take of the checkpoint in `folder`."""
        is_pretrained = checkpoint.load is None or folder.parent != Path(checkpoint.load)
        return StoredRun(folder, manifest, checkpoint.finetune or is_pretrained or manifest.is_release)

    @property
    def consumed_samples(self) -> int:
        """With how many samples behind it the run begins."""
        return 0 if self.weights_only else self.manifest.consumed_samples

    def gives_moments(self, config: Config) -> bool:
        """Whether the optimizer goes on where it was."""
        return not (self.weights_only or config.checkpoint.no_load_optim or config.training.skip_train)

    def check_contents(self, config: Config, units: Sequence[UnitSpec]) -> None:
        """Nothing, where it holds what the run takes. Rotary positions may turn otherwise where the optimizer begins anew.

        units: of the model. Raises CheckpointError for what differs or is missing.
        """
        gives_moments = self.gives_moments(config)
        check_model(self.folder, self.manifest, config.model, units, may_rotate_otherwise=not gives_moments)
        if gives_moments:
            check_moments(self.folder, self.manifest)

    def notices(self, config: Config) -> list[str]:
        """What differs, may do so, and should be known."""
        rotation = rotation_differences(self.manifest, config.model)
        return [f"WARNING: the weights were trained with other rotary positions: {'; '.join(rotation)}"] if rotation else []
