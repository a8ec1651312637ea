"""`ray-goodput grafana install`: the dashboard and the alert rules as files, where Grafana and Prometheus find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ray_goodput.cli.options import AsJson
from ray_goodput.errors import ConfigError

DASHBOARD_FILE = "ray_goodput_dashboard.json"
RULES_FILE = "ray_goodput_rules.yml"
RAYS_FOLDER = Path("/tmp/ray/session_latest/metrics/grafana/dashboards")

grafana = typer.Typer(help="See runs in Grafana and be told by Prometheus.", no_args_is_help=True)


@grafana.callback()
def _group() -> None:
    """See runs in Grafana and be told by Prometheus."""


@grafana.command("install")
def install(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Folder from which Grafana provisions dashboards. Default: that of the Ray cluster on this machine, "
            "which Ray empties when its dashboard starts.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the dashboard and the alert rules; running it again brings them up to date."""
    chosen = folder if folder is not None else RAYS_FOLDER
    if folder is None and not chosen.is_dir():
        raise ConfigError(
            f"There is no Ray cluster with a dashboard on this machine ({chosen} is missing): give the folder from "
            "which your Grafana provisions dashboards (--dir)."
        )
    try:
        chosen.mkdir(parents=True, exist_ok=True)
        written = [chosen / name for name in write_files(chosen)]
    except OSError as error:
        raise ConfigError(f"The dashboard cannot be written to {chosen}: {error.strerror}.") from None
    if as_json:
        print(json.dumps({"dashboard": str(written[0]), "rules": str(written[1])}))
        return
    print(f"dashboard: {written[0]}")
    print(f"rules:     {written[1]}  (name it under rule_files in prometheus.yml; Ray's own file names none)")


def write_files(folder: Path) -> tuple[str, str]:
    """Both files are in `folder`; their names, the dashboard's first."""
    (folder / DASHBOARD_FILE).write_text(dashboard_text(), encoding="utf-8")
    (folder / RULES_FILE).write_text(rules_text(), encoding="utf-8")
    return DASHBOARD_FILE, RULES_FILE


def dashboard_text() -> str:
    """The dashboard as Grafana reads it."""
    from ray_goodput.goodput.dashboard import dashboard

    return json.dumps(dashboard(), indent=1) + "\n"


def rules_text() -> str:
    """The rules as Prometheus reads them."""
    import yaml

    from ray_goodput.goodput.alerts import rules

    head = "# Made by `ray-goodput grafana install` from ray_goodput/goodput/alerts.py: change it there.\n"
    return head + yaml.safe_dump(rules(), sort_keys=False, width=100)
