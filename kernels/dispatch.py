"""Chooses, call by call, between an op's torch reference and its kernel.

    @op
    def rmsnorm(x, weight, eps): ...      # the reference: runs anywhere, and is the oracle of the parity tests

    @rmsnorm.kernel
    def _launch(x, weight, eps): ...      # the fast form; absent: the reference serves

`use("reference")` and `use("kernel")` force one form inside a `with` block; tests compare the two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
Form = Literal["auto", "reference", "kernel"]

_form: ContextVar[Form] = ContextVar("kernel_form", default="auto")


class Op(Generic[P, R]):
    """One op: a reference and, where there is one, a kernel. Calling it runs the form in force."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.fast: Callable[P, R] | None = None
        self.__doc__ = reference.__doc__
        OPS[self.name] = self

    def kernel(self, fast: Callable[P, R]) -> Callable[P, R]:
        """Registers the fast form, which runs for CUDA tensors."""
        self.fast = fast
        return fast

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        form = _form.get()
        if self.fast is None:  # first: a step on the CPU comes here three hundred times
            if form == "kernel":
                raise NotImplementedError(f"{self.name} has no kernel")
            return self.reference(*args, **kwargs)
        first = args[0] if args else None
        on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        if form == "kernel" or (form == "auto" and on_gpu):
            return self.fast(*args, **kwargs)
        return self.reference(*args, **kwargs)


OPS: dict[str, Op[..., Any]] = {}


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Makes `reference` an op of its name."""
    return Op(reference)


@contextlib.contextmanager
def use(form: Form) -> Iterator[None]:
    """Forces `form` for every op called in the block."""
    token = _form.set(form)
    try:
        yield
    finally:
        _form.reset(token)
