"""Fixtures for replayed searches."""

from tests.search.conftest import empty_simulated_study, new_directory

__all__ = ["empty_simulated_study", "new_directory"]
