"""Importers of profiles that others measured; `import_folder` tells their kind by the file names."""

from planner.profile.importers.folder import Import, import_folder

__all__ = ["Import", "import_folder"]
