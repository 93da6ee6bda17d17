"""Names of other projects that docstrings and signatures mention, and where their documentation has
them.

Sphinx wants lists of names (inventories), which it fetches. A build without a network has these
instead: written by hand, one line a name, and turned into the format that Sphinx reads.
"""

import tempfile
import zlib
from pathlib import Path

PROJECTS = {
    "python": "https://docs.python.org/3",
    "torch": "https://docs.pytorch.org/docs/stable",
    "transformers": "https://huggingface.co/docs/transformers/main/en",
    "xarray": "https://docs.xarray.dev/en/stable",
    "numpy": "https://numpy.org/doc/stable",
    "pandas": "https://pandas.pydata.org/docs",
    "scipy": "https://docs.scipy.org/doc/scipy",
    "pillow": "https://pillow.readthedocs.io/en/stable",
    "matplotlib": "https://matplotlib.org/stable",
    "filelock": "https://py-filelock.readthedocs.io/en/latest",
}
NAMES = {
    "python": """
        collections.abc.Callable py:class library/collections.abc.html#$
        collections.abc.Collection py:class library/collections.abc.html#$
        collections.abc.Iterable py:class library/collections.abc.html#$
        collections.abc.Iterator py:class library/collections.abc.html#$
        collections.abc.Generator py:class library/collections.abc.html#$
        collections.abc.Hashable py:class library/collections.abc.html#$
        collections.abc.Mapping py:class library/collections.abc.html#$
        collections.abc.Sequence py:class library/collections.abc.html#$
        collections.Counter py:class library/collections.html#$
        contextlib.AbstractContextManager py:class library/contextlib.html#$
        contextlib.ExitStack py:class library/contextlib.html#$
        _thread._local py:class library/threading.html#threading.local
        pathlib.Path py:class library/pathlib.html#$
        typing.Any py:data library/typing.html#$
        typing.Protocol py:class library/typing.html#$
        typing.NamedTuple py:class library/typing.html#$
        typing.TypeVar py:class library/typing.html#$
        abc.ABC py:class library/abc.html#$
        enum.Enum py:class library/enum.html#$
        object py:class library/functions.html#$
        bool py:class library/functions.html#$
        int py:class library/functions.html#$
        float py:class library/functions.html#$
        str py:class library/stdtypes.html#$
        bytes py:class library/stdtypes.html#$
        dict py:class library/stdtypes.html#$
        list py:class library/stdtypes.html#$
        tuple py:class library/stdtypes.html#$
        set py:class library/stdtypes.html#$
        frozenset py:class library/stdtypes.html#$
        slice py:class library/functions.html#$
        type py:class library/functions.html#$
        range py:class library/stdtypes.html#range
        None py:data library/constants.html#$
        ValueError py:exception library/exceptions.html#$
        TypeError py:exception library/exceptions.html#$
        KeyError py:exception library/exceptions.html#$
        LookupError py:exception library/exceptions.html#$
        AttributeError py:exception library/exceptions.html#$
        RuntimeError py:exception library/exceptions.html#$
        MemoryError py:exception library/exceptions.html#$
        OverflowError py:exception library/exceptions.html#$
        OSError py:exception library/exceptions.html#$
        ImportError py:exception library/exceptions.html#$
        KeyboardInterrupt py:exception library/exceptions.html#$
        Exception py:exception library/exceptions.html#$
        BaseException py:exception library/exceptions.html#$
        UserWarning py:exception library/exceptions.html#$
        Warning py:exception library/exceptions.html#$
        DeprecationWarning py:exception library/exceptions.html#$
    """,
    "filelock": """
        filelock._api.BaseFileLock py:class api.html#filelock.BaseFileLock
    """,
    "torch": """
        torch.Tensor py:class tensors.html#$
        torch._C.Generator py:class generated/torch.Generator.html
        torch.dtype py:class tensor_attributes.html#$
        torch.device py:class tensor_attributes.html#$
        torch.utils._python_dispatch.TorchDispatchMode py:class notes/extending.html#extending-all-torch-api-with-modes
        torch.overrides.TorchFunctionMode py:class notes/extending.html#extending-all-torch-api-with-modes
        torch.Generator py:class generated/torch.Generator.html#$
        torch.nn.Module py:class generated/torch.nn.Module.html#$
        torch.nn.modules.module.Module py:class generated/torch.nn.Module.html#torch.nn.Module
        torch.nn.parameter.Parameter py:class generated/torch.nn.parameter.Parameter.html#$
        torch.autograd.Function py:class generated/torch.autograd.Function.html#$
    """,  # noqa: E501
    "transformers": """
        transformers.PreTrainedModel py:class main_classes/model#$
        transformers.PretrainedConfig py:class main_classes/configuration#$
        transformers.Trainer py:class main_classes/trainer#$
    """,
    "xarray": """
        xarray.Dataset py:class generated/xarray.Dataset.html#$
        xarray.DataArray py:class generated/xarray.DataArray.html#$
        xarray.Variable py:class generated/xarray.Variable.html#$
    """,
    "numpy": """
        numpy.ndarray py:class reference/generated/numpy.ndarray.html#$
        numpy.dtype py:class reference/generated/numpy.dtype.html#$
        numpy.random.Generator py:class reference/random/generator.html#$
    """,
    "pandas": """
        pandas.DataFrame py:class reference/api/pandas.DataFrame.html#$
        pandas.core.frame.DataFrame py:class reference/api/pandas.DataFrame.html#pandas.DataFrame
        pandas.Index py:class reference/api/pandas.Index.html#$
        pandas.Series py:class reference/api/pandas.Series.html#$
    """,
    "scipy": """
        scipy.sparse.linalg.LinearOperator py:class reference/generated/scipy.sparse.linalg.LinearOperator.html#$
    """,  # noqa: E501
    "pillow": """
        PIL.Image.Image py:class reference/Image.html#$
    """,
    "matplotlib": """
        matplotlib.axes.Axes py:class api/_as_gen/matplotlib.axes.Axes.html#$
        matplotlib.axis.Axis py:class api/axis_api.html#$
        matplotlib.colorbar.Colorbar py:class api/colorbar_api.html#$
        matplotlib.image.AxesImage py:class api/image_api.html#$
        matplotlib.colors.Normalize py:class api/_as_gen/matplotlib.colors.Normalize.html#$
        matplotlib.figure.Figure py:class api/_as_gen/matplotlib.figure.Figure.html#$
    """,
}
"""Name, kind and place of each; ``$`` stands for the name."""


def entries(project: str) -> list[str]:
    """Lines of an inventory."""
    rows = [line.split() for line in NAMES[project].splitlines() if line.strip()]
    return [f"{name} {kind} 1 {place} -" for name, kind, place in rows]


def inventory(project: str) -> bytes:
    """An inventory in the format of Sphinx, version 2."""
    head = (
        f"# Sphinx inventory version 2\n# Project: {project}\n# Version: stored\n# The "
        "remainder of this file is compressed using zlib.\n"
    )
    return head.encode() + zlib.compress("".join(f"{line}\n" for line in entries(project)).encode())


def mapping(online: bool) -> dict[str, tuple[str, str | None]]:
    """What Sphinx is told of other projects: their addresses, and the stored lists, or None to
    fetch theirs."""
    if online:
        return {project: (address, None) for project, address in PROJECTS.items()}
    folder = Path(tempfile.mkdtemp(prefix="lipbound-inventories-"))
    for project in PROJECTS:
        (folder / f"{project}.inv").write_bytes(inventory(project))
    return {
        project: (address, str(folder / f"{project}.inv")) for project, address in PROJECTS.items()
    }
