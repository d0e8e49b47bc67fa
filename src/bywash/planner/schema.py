"""JSON Schema of everything that people write for the planner: editors complete and check with it."""

from typing import Any

from pydantic import BaseModel

from bywash.planner.cluster_file import ClusterFile
from bywash.planner.devices import DEVICES
from bywash.planner.target import Target, Workload

SCHEMAS: dict[str, type[BaseModel]] = {"cluster": ClusterFile, "workload": Workload, "target": Target}


def json_schema(name: str) -> dict[str, Any]:
    """The schema of `cluster`, `workload` or `target`; known device generations are offered as examples."""
    schema = SCHEMAS[name].model_json_schema()
    if name == "cluster":
        schema["$defs"]["NodeFile"]["properties"]["device"]["examples"] = sorted(DEVICES)
    made: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"bywash {name}"}
    return made | schema
