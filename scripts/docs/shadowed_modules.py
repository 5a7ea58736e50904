"""Shows mkdocstrings what users get where a function and the module that defines it share a name.

`penstock.sim.simulator` is a module, and also the function in it that `penstock.sim` passes on.
Whoever writes it gets the function, while griffe, which only reads, takes the module.
"""

from typing import Any

import griffe


class ShadowedModules(griffe.Extension):
    """Puts each such function at its place in the package, before anything is looked up."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called by griffe once a package has been read as a whole."""
        packages = [pkg]
        while packages:
            package = packages.pop()
            modules = {
                name: module for name, module in package.modules.items() if not module.is_alias
            }
            packages += [module for module in modules.values() if module.is_init_module]
            for name, module in modules.items():
                if package.imports.get(name) == f"{module.path}.{name}":
                    _lift(package, module)


def _lift(package: griffe.Module, module: griffe.Module) -> None:
    """Gives the package what it imports from the module, which is then hidden by one of its own."""
    for name, origin in package.imports.items():
        if origin == f"{module.path}.{name}":
            package.set_member(name, griffe.Alias(name, target=module[name], parent=package))
