"""The OpenAPI document: FastAPI's own, with the job file and the problem document that routes refer to."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from actors.job import Job
from eth_service.errors import Problem

_REFERENCE = "#/components/schemas/{model}"
_BY_NAME = {
    "model": "a preset's name or a file",
    "cluster": "a short form such as 4x8:910B2,4x8:910B4, or a file",
    "plan": "a file",
}


def install_openapi(app: FastAPI) -> None:
    """Complete the document that /openapi.json serves; it is made once."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas |= {name: schema for name, schema in _extra_schemas().items() if name not in schemas}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _extra_schemas() -> dict[str, Any]:
    job = Job.model_json_schema(ref_template=_REFERENCE)
    shared = job.pop("$defs")
    for field, meaning in _BY_NAME.items():
        # A Job holds what the name stands for; the file may give the name instead.
        given = job["properties"][field]
        kept = {key: given.pop(key) for key in ("default", "title") if key in given}
        forms = given.get("anyOf", [given])
        job["properties"][field] = {"anyOf": [{"type": "string", "description": meaning}, *forms], **kept}
    return {**shared, "Job": job, "Problem": Problem.model_json_schema(ref_template=_REFERENCE)}
