"""How far the gradients of a step have come, and which calls may follow."""

from __future__ import annotations

import enum


class _State(enum.Enum):
    """NONE: there are none yet. SOME: those of some micro-batches. ALL: those of all, which may still descend. MEAN: their mean.
    USED: a mean that an update has used. BROKEN: those of a backward that has not come to its end. LENT: their memory holds something else.
    """

    NONE = "none"
    SOME = "some"
    ALL = "all"
    MEAN = "mean"
    USED = "used"
    BROKEN = "broken"
    LENT = "lent"


class GradientProgress:
    """The gradients of one step after the other. Each call raises RuntimeError if it is out of turn, and says which is due."""

    def __init__(self) -> None:
        self._state = self._before_loan = _State.NONE
        self._arrived: set[str] = set()  # the parameters whose gradients have come in this backward

    def check_usable(self) -> None:
        """Raises RuntimeError if a backward has failed, or if the weights are not those that are trained."""
        if self._state is _State.LENT:
            raise RuntimeError("outer_weights() has put other weights in place of those that are trained; leave its block first")
        if self._state is _State.BROKEN:
            raise RuntimeError("an earlier engine.backward() failed, so some gradients are missing; make the module and its engine anew")

    def begin_backward(self) -> None:
        """Begins the backward of a micro-batch; until its end the gradients are unusable."""
        self.check_usable()
        if self._state in (_State.ALL, _State.MEAN):
            raise RuntimeError(
                "the last micro-batch of this step has come already; call engine.step(), and pass is_last_microbatch=False for every "
                "micro-batch but the last"
            )
        self._state = _State.BROKEN
        self._arrived.clear()

    def arrive(self, parameter: str) -> None:
        """The gradient of a parameter has come, which autograd has made complete: a second one would replace it."""
        if parameter in self._arrived:
            raise RuntimeError(
                f"the gradient of {parameter} came twice in one backward, because the parameter is used in several parts that are "
                "recomputed with use_reentrant=True; pass use_reentrant=False to torch's checkpoint()"
            )
        self._arrived.add(parameter)

    def end_backward(self, *, is_last_microbatch: bool) -> None:
        """Ends it. is_last_microbatch: whether it was the last of the step."""
        self._state = _State.ALL if is_last_microbatch else _State.SOME

    def is_mean_missing(self) -> bool:
        """Whether there are gradients of which the mean is still to be taken."""
        self.check_usable()
        if self._state is _State.SOME:
            raise RuntimeError("no micro-batch of this step was the last; pass is_last_microbatch=True with the last one")
        return self._state is _State.ALL

    def end_mean(self) -> None:
        """The mean has been taken."""
        self._state = _State.MEAN

    def begin_update(self) -> None:
        """Begins an update; before the first backward all gradients are zeros."""
        self.check_usable()
        if self._state in (_State.SOME, _State.ALL):
            raise RuntimeError("call engine.finish_gradients() before engine.update()")
        if self._state is _State.USED:
            raise RuntimeError(
                "the last update has used the gradients, and no others have come; call engine.backward() before the next step"
            )

    def check_used(self) -> None:
        """Raises RuntimeError within a step: between its first backward and its update."""
        self.check_usable()
        if self._state not in (_State.NONE, _State.USED):
            raise RuntimeError("gradients have come that no update has used; call engine.step() first")

    def lend(self) -> None:
        """Lends the memory of gradients, which holds zeros when it comes back. Until then no gradient may come."""
        self.check_used()
        self._state, self._before_loan = _State.LENT, self._state

    def take_back(self) -> None:
        """Ends the loan."""
        self._state = self._before_loan

    def end_update(self) -> None:
        """Ends the step."""
        if self._state is _State.MEAN:
            self._state = _State.USED
