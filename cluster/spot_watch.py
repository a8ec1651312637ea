#!/usr/bin/env python3
"""Watch for the EC2 notice that this spot instance is taken away, then drain its Ray node.

    python spot_watch.py

Ray's launcher does not look at these notices. AWS gives one two minutes ahead, on a best-effort basis, in the
instance's metadata, and advises to look every 5 s. Standard library only; `drain_node.py` lies beside this file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime

import drain_node

METADATA = "http://169.254.169.254"
TIMEOUT_S = 2.0
MARGIN_S = 5  # the notice's time is approximate: promise Ray a little less

logger = logging.getLogger("spot_watch")


def read_notice(base: str = METADATA) -> dict[str, str] | None:
    """The notice, such as `{"action": "terminate", "time": "2026-01-01T00:02:00Z"}`; None when there is none.

    Raises:
        OSError: the metadata service does not answer.
    """
    lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    ask = urllib.request.Request(f"{base}/latest/api/token", method="PUT", headers=lifetime)
    with urllib.request.urlopen(ask, timeout=TIMEOUT_S) as reply:
        token = reply.read().decode()
    url = f"{base}/latest/meta-data/spot/instance-action"
    ask = urllib.request.Request(url, headers={"X-aws-ec2-metadata-token": token})
    try:
        with urllib.request.urlopen(ask, timeout=TIMEOUT_S) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        if error.code == 404:  # what AWS answers as long as nothing is planned
            return None
        raise


def seconds_left(notice: dict[str, str], now: datetime) -> int:
    """Whole seconds until the instance goes, less a margin, and never negative. Pure."""
    goes_at = datetime.strptime(notice["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    return max(0, int((goes_at - now).total_seconds()) - MARGIN_S)


def wait_for_notice(base: str = METADATA, poll_s: float = 5.0) -> dict[str, str]:
    """Returns the notice once there is one. A metadata service that does not answer is asked again."""
    silent = False
    while True:
        try:
            notice = read_notice(base)
        except (OSError, ValueError) as error:
            if not silent:
                logger.warning("The instance metadata cannot be read (%s); asking again every %g s.", error, poll_s)
            silent = True
        else:
            silent = False
            if notice is not None and notice.get("time"):
                return notice
        time.sleep(poll_s)


def main(argv: list[str] | None = None) -> int:
    """Waits for the notice, drains the node, ends."""
    parser = argparse.ArgumentParser(description="Drain this Ray node when EC2 announces that it takes the instance.")
    parser.add_argument("--metadata", default=METADATA, help="address of the instance metadata service")
    parser.add_argument("--poll-s", type=float, default=5.0, help="seconds between two looks")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    notice = wait_for_notice(args.metadata, args.poll_s)
    left_s = seconds_left(notice, datetime.now(UTC))
    logger.warning("EC2 announces %s at %s: draining, %d s left.", notice.get("action"), notice["time"], left_s)
    reason = f"EC2 spot notice: {notice.get('action')} at {notice['time']}"
    logger.warning("%s", drain_node.drain(left_s, reason))
    return 0


if __name__ == "__main__":
    sys.exit(main())
