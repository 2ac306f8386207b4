"""The parameters in a checkpoint, without the rest of its state."""

from __future__ import annotations

import torch

from actors.checkpoints import model_difference, read_manifest
from actors.engine.checkpoint import load_slices
from actors.engine.state_slices import StateSlice, parameter_key
from actors.engine.weight_files import padded_shard
from actors.engine.weights import DTYPES
from actors.storage import StoragePath
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.parameters import Parameter


class CheckpointWeights:
    """The weights of a model in a checkpoint, whatever plan wrote it. UserError if it is another model's."""

    def __init__(self, path: StoragePath, model: ModelSpec) -> None:
        manifest = read_manifest(path)
        if (difference := model_difference(model, manifest.model)) is not None:
            raise UserError(
                f"weights {path}: the checkpoint is of another model than {model.name}: {difference}; use its model"
            )
        self._path, self._dtype = path, DTYPES[manifest.training.precision]

    def dtype(self, parameter: Parameter) -> torch.dtype:
        """The precision that was trained in, the same for all."""
        return self._dtype

    def parameter(self, parameter: Parameter) -> torch.Tensor:
        """A whole parameter."""
        return self._read(parameter, None)

    def shard(self, parameter: Parameter, *, tp: int, tp_rank: int) -> torch.Tensor:
        """A TP rank's part of a parameter, padded with zeros to `padded_shard_shape`."""
        if parameter.tp_dim is None:
            return self._read(parameter, None)
        part = self._read(parameter, parameter.shard_range(tp=tp, tp_rank=tp_rank))
        return padded_shard(parameter, part, tp=tp)

    def _read(self, parameter: Parameter, tp_range: tuple[int, int] | None) -> torch.Tensor:
        shape, offsets = list(parameter.shape), [0] * len(parameter.shape)
        if tp_range is not None:
            assert parameter.tp_dim is not None
            offsets[parameter.tp_dim] = tp_range[0]
            shape[parameter.tp_dim] = tp_range[1] - tp_range[0]
        tensor = torch.empty(shape, dtype=self._dtype)
        if tensor.numel():
            key = parameter_key(parameter.name)
            load_slices(self._path, [StateSlice(key, parameter.shape, tuple(offsets), tensor, owned=False)])
        return tensor
