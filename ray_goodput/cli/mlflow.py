"""`ray-goodput mlflow send`: what a driver could not send to MLflow, because its server was away, is sent now."""

from __future__ import annotations

import functools
import json
from typing import Annotated

import typer

from ray_goodput.cli.options import AsJson, StorageOptions, parse_options
from ray_goodput.errors import GoodputError, StorageError

mlflow = typer.Typer(help="Bring a run's metrics to MLflow.", no_args_is_help=True)


@mlflow.callback()
def _group() -> None:
    """Bring a run's metrics to MLflow."""


@mlflow.command("send")
def send(
    uri: Annotated[str, typer.Argument(help="A run's folder: STORAGE_PATH/RUN, local or s3://.")],
    tracking_uri: Annotated[
        str | None, typer.Option(help="The server, if it moved or needs credentials in its URL. Default: the run's.")
    ] = None,
    storage_options: StorageOptions = None,
    as_json: AsJson = False,
) -> None:
    """Send what is left of a run, with its status, report and ledger; nothing is sent twice, nothing is left behind."""
    from ray_goodput.cli.stdout import only_ours
    from ray_goodput.config import StoreSpec
    from ray_goodput.goodput.mlflow_artifacts import run_artifacts
    from ray_goodput.goodput.mlflow_run import message_of
    from ray_goodput.goodput.mlflow_sink import send_spools
    from ray_goodput.storage import open_store

    store = open_store(StoreSpec(uri=uri, options=parse_options(storage_options)))
    with only_ours() as out:
        try:
            sent = send_spools(store, functools.partial(run_artifacts, store), tracking_uri=tracking_uri)
        except GoodputError:
            raise
        except Exception as error:  # MLflow's own and whatever its client's transport raises
            why = message_of(error, tracking_uri or "")
            raise StorageError(f"MLflow did not take what is left of the run, it stays where it is: {why}") from None
        if as_json:
            print(json.dumps({"uri": uri, "sent": sent}), file=out)
            return
        for spool in sent:
            print(f"{spool['points']} points, status {spool['status']} -> MLflow run {spool['run_id']}", file=out)
        if not sent:
            print("Nothing is left to be sent.", file=out)
