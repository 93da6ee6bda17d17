"""Models in float64 throughout, though their code casts to narrower dtypes on the way."""

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NARROW = (torch.float32, torch.bfloat16, torch.float16)


class WithoutCasts(TorchFunctionMode):
    """Leave float64 tensors in float64 where a model's own code casts to a narrower dtype.

    New tensors are in float64, too.
    """

    def __enter__(self) -> Self:
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
                return first
            args = tuple(torch.float64 if _is_narrow(value) else value for value in args)
            kwargs |= {name: torch.float64 for name, value in kwargs.items() if _is_narrow(value)}
        return func(*args, **kwargs)


def _is_narrow(value: object) -> bool:
    return isinstance(value, torch.dtype) and value in NARROW
