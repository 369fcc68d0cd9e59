"""The whole record as JSON: what `autotune.load` reads back."""

from __future__ import annotations

import json

from autotune.config import TrainingConfig
from autotune.records import Recommendation


def export(recommendation: Recommendation, config: TrainingConfig | None = None) -> str:
    """The recommendation as JSON text, in ASCII: what would steer a terminal is escaped.

    It holds every answer, so `config` picks nothing out of it.
    """
    return json.dumps(json.loads(recommendation.model_dump_json()), indent=2) + "\n"


def missing_functions(recommendation: Recommendation) -> tuple[str, ...]:
    """None: no function is needed to read it."""
    return ()
