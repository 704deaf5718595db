"""From the operators' error texts to Python exceptions. (Torch's stable ABI lets a kernel throw one type only.)"""
import torch

_KINDS = {
    "invalid argument": ValueError,
    "unsupported": NotImplementedError,
    "out of memory": torch.OutOfMemoryError,
}


def translate(error):
    """The exception a caller should see instead of `error`, or None when it is not ours."""
    head, _, rest = str(error).partition("lla: ")
    if head or not rest:
        return None
    kind, _, message = rest.partition(": ")
    return _KINDS[kind](message) if kind in _KINDS else None


def raise_ours(error):
    """Raises what a caller should see instead of `error`, or `error` itself."""
    ours = translate(error)
    if ours is None:
        raise error
    raise ours from None


def call(op, *args):
    """Runs an operator; wrong arguments become ValueError and so on. Traced code calls the operator directly."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise_ours(error)


def need_tensor(name, value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
