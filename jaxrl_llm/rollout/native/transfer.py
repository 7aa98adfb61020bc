"""Copy the policy's weights to a rollout on other devices than the trainer's."""

from __future__ import annotations

import functools

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.models import decode
from jaxrl_llm.models.decode import DecodeWeights
from jaxrl_llm.models.lora import MARK, split_params
from jaxrl_llm.rollout.native.programs import Programs
from jaxrl_llm.sharding.compile import Program
from jaxrl_llm.sharding.placement import reshard
from jaxrl_llm.sharding.rules import TRAIN, bytes_per_device
from jaxrl_llm.structs import Params


class WeightTransfer:
    """Copy of the policy's weights on the devices of the rollout.

    The trainer's devices cast the weights and cut them into layers, sharded as in training; then each array
    is sent into the rollout's sharding. Frozen weights of a model with adapters are sent once.
    """

    def __init__(self, programs: Programs):
        self.programs = programs
        self.num_bytes = 0  # sent by the last call
        paths, self._structure = jax.tree_util.tree_flatten_with_path(programs.shardings["weights"])
        adapted = programs.config.lora is not None
        self._shardings = [sharding for _, sharding in paths]
        self._is_frozen = [adapted and MARK not in jax.tree_util.keystr(path) for path, _ in paths]
        self._sources: list[jax.Array] = []  # the trainer's frozen weights that were sent last
        self._copies: dict[int, jax.Array] = {}  # place in `_shardings` -> copy of a frozen weight

    def is_needed(self, params: Params) -> bool:
        """Return whether the weights are on other devices than the rollout's."""
        sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)  # None: in the memory of the host
        own = self.programs.mesh.devices.flat
        return isinstance(sharding, NamedSharding) and sharding.device_set != set(own)

    def __call__(self, params: Params) -> DecodeWeights:
        """Return the copy. A collective."""
        frozen = jax.tree.leaves(split_params(params)[1])
        if len(frozen) != len(self._sources) or any(
            new is not old for new, old in zip(frozen, self._sources, strict=True)
        ):
            self._sources, self._copies = frozen, {}
        call = self.program(params, skip_frozen=bool(self._copies))
        with jax.set_mesh(_mesh_of(params)):
            converted = call.fn(*call.args)
        sent = {i: reshard(x, self._shardings[i]) for i, x in converted.items()}
        self.num_bytes = sum(x.nbytes for x in sent.values())
        leaves = self._copies | sent
        self._copies = {i: x for i, x in leaves.items() if self._is_frozen[i]}
        return jax.tree.unflatten(self._structure, [leaves[i] for i in range(len(leaves))])

    def versioned_weights(self, weights: DecodeWeights) -> list[jax.Array]:
        """Return the weights that each version has for itself: all, or adapters where the base is frozen."""
        return [
            x for x, is_frozen in zip(jax.tree.leaves(weights), self._is_frozen, strict=True) if not is_frozen
        ]

    def bytes_of_version(self) -> int:
        """Return the bytes on each device that a further version of the weights takes."""
        return bytes_per_device(self.versioned_weights(self.programs.abstract_weights()))

    def free(self) -> None:
        """Free the copies of frozen weights."""
        self._sources, self._copies = [], {}

    def program(self, params: Params, skip_frozen: bool = False) -> Program:
        """Return the program that the trainer's devices run; its result is {place: array}."""
        return Program(self._converter(_mesh_of(params), skip_frozen), (params,), {})

    @functools.cache  # noqa: B019  an engine has one transfer, and both live as long as the run
    def _converter(self, mesh: Mesh, skip_frozen: bool):
        config, dtype = self.programs.config, self.programs.dtype
        shardings = decode.decode_shardings(config, mesh, TRAIN)

        def select(leaves):
            return {i: x for i, x in enumerate(leaves) if not (skip_frozen and self._is_frozen[i])}

        def convert(params: Params) -> dict[int, jax.Array]:
            return select(jax.tree.leaves(decode.decode_weights(params, dtype, shardings)))

        return jax.jit(convert, out_shardings=select(jax.tree.leaves(shardings)))


def _mesh_of(params: Params) -> Mesh:
    """Return the mesh that the weights are sharded over."""
    return jax.tree.leaves(params)[0].sharding.mesh
