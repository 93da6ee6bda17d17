"""Module paths and names of earlier versions: each warns, says where to go, and gives the very same object."""

import importlib
import sys
import types
import warnings

import pytest

import lipbound
from lipbound import moved

PLACES = {old: places.split() for old, places in (moved.MOVED | moved.ALIASES).items()}


@pytest.fixture(autouse=True)
def _old_modules_not_yet_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported them; the warning comes with the first import."""
    for old in [*PLACES, "recipes"]:
        monkeypatch.delitem(sys.modules, f"lipbound.{old}", raising=False)


def import_old(old: str) -> types.ModuleType:
    """Import an old module; exactly one warning must come of it, and name every new place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(f"lipbound.{old}")
    said = [w for w in caught if issubclass(w.category, DeprecationWarning) and f"lipbound.{old} has moved to" in str(w.message)]
    assert len(said) == 1
    for place in PLACES.get(old, ["analysis.recipes"]):
        assert f"lipbound.{place}" in str(said[0].message)
    return module


def defined_in(module: types.ModuleType) -> dict[str, object]:
    """The classes and functions that a module defines itself; of a package that defines none, its public names."""
    here = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    own = {name: value for name, value in here.items() if not name.startswith("__")}
    return own or {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("old", sorted(moved.MOVED))
def test_old_modules_lead_to_new_ones(old: str) -> None:
    module = import_old(old)
    defined: dict[str, object] = {}
    for place in reversed(PLACES[old]):
        found = defined_in(importlib.import_module(f"lipbound.{place}"))
        assert found or old == "bounds.citations", f"lipbound.{place} defines nothing"  # which held a constant
        defined |= found
    shadowed = {key.rpartition(".")[2] for key in moved.RENAMED if key.rpartition(".")[0] == old}
    for name, value in defined.items():
        if name not in shadowed:
            assert getattr(module, name) is value, name
    with pytest.raises(AttributeError, match=f"lipbound.{old} has no 'nothing_of_that_name' any more; its contents are in lipbound."):
        _ = module.nothing_of_that_name


@pytest.mark.parametrize("key", sorted(moved.RENAMED))
def test_old_names_lead_to_new_ones(key: str) -> None:
    old, _, name = key.rpartition(".")
    places = [vars(importlib.import_module(f"lipbound.{place}")) for place in PLACES[old]]
    new = [place[moved.RENAMED[key]] for place in places if moved.RENAMED[key] in place]
    assert new, f"{moved.RENAMED[key]} is in none of {PLACES[old]}"
    assert getattr(import_old(old), name) is new[0]


@pytest.mark.parametrize("old", sorted(moved.ALIASES))
def test_aliases_are_the_new_modules_themselves(old: str) -> None:
    assert import_old(old) is importlib.import_module(f"lipbound.{moved.ALIASES[old]}")


def test_the_old_folder_of_recipes() -> None:
    assert import_old("recipes") is importlib.import_module("lipbound.analysis.recipes")


@pytest.mark.parametrize("old", sorted(moved.FUNCTIONS))
def test_functions_are_no_modules(old: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"lipbound.{old} is a function, lb.{old}, and no module any more"):
        importlib.import_module(f"lipbound.{old}")
    assert callable(getattr(lipbound, old))
    assert getattr(lipbound, old) is getattr(importlib.import_module(f"lipbound.{moved.FUNCTIONS[old]}"), old)


def test_no_old_path_is_a_module_again() -> None:
    """A file at an old path would be found first, and the old names would be gone."""
    for old in [*moved.MOVED, *moved.ALIASES, *moved.FUNCTIONS]:
        assert importlib.machinery.PathFinder.find_spec(f"lipbound.{old}".rpartition(".")[2], _path_of(old)) is None, old


def _path_of(old: str) -> list[str]:
    """Where the import system would look for a module of that name."""
    parent = importlib.import_module(f"lipbound.{old.rpartition('.')[0]}" if "." in old and not old.startswith("recipes") else "lipbound")
    return list(parent.__path__)


@pytest.mark.parametrize("old", sorted(moved.FOLDERS))
def test_names_of_modules_whose_paths_are_folders_now(old: str) -> None:
    folder, _, name = old.rpartition(".")
    package = importlib.import_module(f"lipbound.{folder}")
    with pytest.warns(DeprecationWarning, match=f"lipbound.{old} has moved to lipbound.{moved.FOLDERS[old]}.{name}"):
        assert getattr(package, name) is getattr(importlib.import_module(f"lipbound.{moved.FOLDERS[old]}"), name)
    with pytest.raises(AttributeError, match=f"lipbound.{folder}' has no attribute 'nothing'"):
        _ = package.nothing
