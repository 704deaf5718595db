"""From the operators' error texts to Python exceptions. (Torch's stable ABI lets a kernel throw one type only.)"""
import torch

_KINDS = {
    "invalid argument": ValueError,
    "unsupported": NotImplementedError,
    "out of memory": torch.OutOfMemoryError,
}


# What the library's options are called here, where it is not their own name.
_NAMES = {"options.tolerance": "tol", "options.window_left": "window_size", "options.window_right": "window_size"}


def _renamed(message, names):
    """`message` with the argument that it begins with as a caller knows it: `names`, or an option's name."""
    name, colon, rest = message.partition(":")
    name = names.get(name) or _NAMES.get(name) or name.removeprefix("options.")
    return name + colon + rest


def translate(error, names={}):
    """The exception a caller should see instead of `error`, or None when it is not ours. names: of the library's
    arguments those that a function calls otherwise."""
    head, _, rest = str(error).partition("lla: ")
    if head or not rest:
        renamed = _renamed(str(error), names)
        return ValueError(renamed) if type(error) is ValueError and renamed != str(error) else None
    kind, _, message = rest.partition(": ")
    return _KINDS[kind](_renamed(message, names)) if kind in _KINDS else None


def raise_ours(error, names={}):
    """Raises what a caller should see instead of `error`, or `error` itself."""
    ours = translate(error, names)
    if ours is None:
        raise error
    raise ours from None


def call(op, *args, names={}):
    """Runs an operator; wrong arguments become ValueError and so on. Traced code calls the operator directly."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise_ours(error, names)


def need_tensor(name, value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
