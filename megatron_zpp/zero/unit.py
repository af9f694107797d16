"""The weights of one unit on one rank: the fp32 main weights, and the storage of the secondary and the full rung.

zero/residency.py decides when a rung is filled and freed; this file fills and frees it. zero/kept_copy.py is the part of a unit that stays
across steps, if the policy keeps one.
The full rung is freed by resizing its storage to 0 bytes, and the same storage is resized back. So tensors saved by autograd stay valid.
While the full rung is freed, a parameter is one NaN expanded to its shape, because reading freed storage would crash the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.comm.codec import Regions
from megatron_zpp.comm.codecs import LinkCodecs
from megatron_zpp.comm.host_link import Home
from megatron_zpp.comm.lanes import Hop
from megatron_zpp.comm.ledger import Category
from megatron_zpp.comm.links import Climb, Links
from megatron_zpp.parallel.specs import UnitSpec
from megatron_zpp.zero.kept_copy import KeptCopy
from megatron_zpp.zero.layout import FlatLayout
from megatron_zpp.zero.policy import Policy, Rung
from megatron_zpp.zero.residency import Residency


class WeightUnit:
    """The weights of one unit.

    main_weight: [slices * slice_numel] fp32, or the type of frozen weights: the slices that this rank's optimizer updates, its own slice or
    all slices; on the device or on the host.
    parameters: the nn.Parameters of the model in `dtype`, in the order of the layout. trains: whether they are trained. If they are
    frozen, a step leaves all rungs fresh.
    kept: the copy of the weights that stays across steps; None if the policy keeps none.
    """

    def __init__(
        self,
        spec: UnitSpec,
        layout: FlatLayout,
        policy: Policy,
        links: Links,
        home: Home,
        codecs: LinkCodecs,
        dtype: torch.dtype,
    ) -> None:
        device = links.device
        self.name = spec.name
        self.trains = spec.trains
        self.layout = layout
        self._policy = policy
        self._links = links
        self._codecs = codecs
        self._home = home
        self._residency: Residency[Hop] = Residency(policy, links.topology)
        self._full = torch.empty(layout.numel, dtype=dtype, device=device)
        self._full_bytes = self._full.untyped_storage().nbytes()
        self._full_regions = Regions.of(self._full, layout.slice_shape)
        self._secondary: Tensor | None = None  # [N, payload_bytes] uint8
        self._own_payload: Tensor | None = None  # [1, payload_bytes] uint8
        nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._nans = [nan.expand(param.spec.shape) for param in layout.params]
        self.parameters = [nn.Parameter(torch.empty(0, dtype=dtype, device=device), spec.trains) for _ in layout.params]
        self._views = [self._full[param.offset : param.offset + param.numel].view(param.spec.shape) for param in layout.params]
        self._release(Rung.FULL)
        self.first_slice, self.slices = (0, layout.slices) if policy.optimizer is Rung.FULL else (links.own_slice, 1)
        self.main_weight = self._home.zeros(self.slices * layout.slice_numel, spec.frozen_in or torch.float32)
        self._main_regions = Regions.of(self.main_weight, layout.slice_shape)
        for segment in layout.segments(self.first_slice, self.slices):
            stop = segment.offset + segment.stop - segment.start
            self.main_weight[segment.offset : stop].copy_(segment.spec.initial_values(segment.start, segment.stop))
        self._iteration = 0
        self.kept = self._make_kept(dtype) if policy.keeps_copy else None
        self._home.link.reserve(max(codecs.inter.payload_bytes(layout.slice_shape), self.kept.whole_bytes if self.kept is not None else 0))

    def _make_kept(self, dtype: torch.dtype) -> KeptCopy:
        if self._policy.weights_in_step is not Rung.FULL:
            return KeptCopy(self.name, self.layout, self._links, dtype, self._home)
        self._allocate_full()
        self._full.zero_()  # a load of the copy writes no padding
        return KeptCopy(self.name, self.layout, self._links, dtype, self._home, self._full)

    # ---- gathering

    def climb(self, rung: Rung) -> None:
        """Submits the hops that make `rung` fresh; none if it is fresh or on its way."""
        for missing in self._residency.needs(rung):
            if self._residency.fills_without_hops:
                self._copy_main_weights()
            elif missing is Rung.SECONDARY:
                climb, payloads = self._to_secondary()
                self._residency.submitted(missing, self._links.climb_to_secondary(climb, payloads))
                self._residency.filled(Rung.PRIMARY)  # a lane prepares hops in order, so it is encoded before a later hop reads it
            else:
                if self._secondary is None:
                    raise RuntimeError(f"unit {self.name}: no secondary rung to climb from")
                self._allocate_full()
                after = self._residency.ticket_below(Rung.FULL)
                hop = self._links.climb_to_full(self.name, self._codecs.intra, self._secondary, self._full_regions, after)
                self._residency.submitted(missing, hop)

    def _copy_main_weights(self) -> None:
        self._allocate_full()
        self._full_regions.copy_(self.main_regions())
        self._residency.filled(Rung.FULL)
        self._attach()

    def _to_secondary(self) -> tuple[Climb, Tensor]:
        """The climb to the secondary rung, and its payloads."""
        slice_shape, kept = self.layout.slice_shape, self.kept
        payloads = kept.payloads if kept is not None else None
        if payloads is None:
            payload_bytes = self._codecs.intra.payload_bytes(slice_shape)
            payloads = self._links.staging.take(self._links.partitions * payload_bytes).view(-1, payload_bytes)
        self._secondary = payloads
        if kept is None:
            return Climb(self.name, slice_shape, self._codecs, self._encoder_of_own()), payloads
        return kept.climb(self.main_regions(), self._codecs, self._iteration), payloads

    @property
    def is_full(self) -> bool:
        """Whether the parameters have their values."""
        return self._residency.is_fresh(Rung.FULL)

    def wait(self, category: Category) -> None:
        """Waits until the full rung is fresh, and books the bytes of its climb.

        category: of a climb that serves this use alone. A climb to a rung that is kept for the whole step is booked as WEIGHTS.
        """
        if self.is_full:
            return
        under_way = self._residency.under_way()
        if Rung.FULL not in under_way:
            raise RuntimeError(
                f"unit {self.name}: its full rung is stale, and no climb comes; recompute unit by unit, with use_reentrant=False"
            )
        self._links.lanes.wait(under_way[Rung.FULL])
        for rung, hop in under_way.items():
            stays = rung <= self._policy.weights_in_step
            self._links.ledger.book(Category.WEIGHTS if stays else category, hop.traffic)
        self._attach()
        self._release(*self._residency.landed())

    # ---- freeing

    def rest(self) -> None:
        """Frees the rungs that the policy does not keep between uses (Policy.weights_in_step), unless a climb is under way."""
        self._release(*self._residency.rest())

    def finish_climbs(self) -> None:
        """Waits for climbs under way, which read the main weights. Call it before these change. `wait` books their bytes."""
        for hop in self._residency.under_way().values():
            self._links.lanes.wait(hop)

    def invalidate(self) -> None:
        """Makes every rung stale, because the main weights have changed. Discards the results of climbs under way."""
        self.finish_climbs()
        rungs = self._residency.invalidate()
        self._release(*rungs)
        if Rung.FULL not in rungs:
            self._detach()  # the storage is kept, but its weights are old

    def replace(self, *, copy_is_filled: bool = False) -> None:
        """Makes every rung stale, because other main weights have been written. A kept copy starts anew.

        copy_is_filled: whether the own slice of the kept copy has been written as well. Otherwise it is taken from the main weights.
        """
        self.invalidate()
        if self.kept is not None:
            self.kept.restart(own_is_filled=copy_is_filled)

    def start_iteration(self, iteration: int) -> None:
        """Sets the number of steps done, from which random codes of differences are drawn."""
        self._iteration = iteration

    def use_codecs(self, codecs: LinkCodecs) -> None:
        """Uses `codecs` from the next climb on; rungs that were filled with the old codecs become stale."""
        self.replace()
        self._codecs = codecs
        self._own_payload = None

    # ---- storage

    def main_regions(self) -> Regions:
        """The main weights by region, on the optimizer's rung."""
        return self._main_regions

    def live_tensors(self) -> list[Tensor]:
        """The tensors whose storages hold this unit's rungs now, without the main weights."""
        rungs = [self._full, self._secondary, self._own_payload, self.kept.payloads if self.kept is not None else None]
        return [tensor for tensor in rungs if tensor is not None]

    def tensors_at_home(self) -> list[Tensor]:
        """The tensors beside the optimizer's state: the main weights, and what mirrors a kept copy on the host."""
        mirror = self.kept.mirror if self.kept is not None else None
        return [self.main_weight] if mirror is None else [self.main_weight, mirror]

    def _encoder_of_own(self) -> Callable[[Tensor], None]:
        """A function that fills the payload of the own slice. If the policy keeps that payload, it encodes once a step and then copies."""
        codec = self._codecs.inter
        encode = partial(self._home.link.encode, partial(codec.encode_into, self.main_regions()))
        if not self._policy.keeps_payloads(encoding_is_costly=codec.encoding_is_costly):
            return encode
        own = self._own_payload
        if own is None:
            own = self._own_payload = self._full.new_empty((1, codec.payload_bytes(self.layout.slice_shape)), dtype=torch.uint8)
        is_first = not self._residency.is_fresh(Rung.PRIMARY)

        def copy_own(payload: Tensor) -> None:
            if is_first:
                encode(own)
            payload.copy_(own)

        return copy_own

    def _attach(self) -> None:
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    def _detach(self) -> None:
        for parameter, nans in zip(self.parameters, self._nans, strict=True):
            parameter.data = nans

    def _allocate_full(self) -> None:
        if self._full.untyped_storage().nbytes() == 0:
            self._full.untyped_storage().resize_(self._full_bytes)

    def _release(self, *rungs: Rung) -> None:
        if Rung.FULL in rungs:
            self._detach()
            self._full.untyped_storage().resize_(0)
        if Rung.SECONDARY in rungs and self._secondary is not None:
            self._links.staging.give(self._secondary.view(-1))
            self._secondary = None
