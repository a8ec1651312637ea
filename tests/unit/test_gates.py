"""Gates: nothing happens without a rule, and with one exactly what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ray_goodput.config import StoreSpec, environment
from ray_goodput.errors import ConfigError
from ray_goodput.gates import Action, InjectedFaultError, Rule, mark_path, obey, rule_path
from ray_goodput.storage import open_store
from ray_goodput.storage.local import LocalStore

FAR = 4e9


def put(folder: Path, name: str, rule: Rule) -> Path:
    path = rule_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rule.to_dict()))
    return path


@pytest.mark.parametrize(
    ("facts", "now_at_s", "strikes"),
    [
        ({"rank": 1, "step": 40}, 0.0, True),
        ({"rank": 1, "step": 39}, 0.0, False),
        ({"rank": 11, "step": 40}, 0.0, False),
        ({"step": 40}, 0.0, False),
        ({"rank": 1}, 0.0, False),
        ({"rank": 1, "step": 40}, 10.0, False),
    ],
)
def test_a_rule_strikes_only_those_it_describes_and_only_in_its_time(
    facts: dict, now_at_s: float, strikes: bool
) -> None:
    rule = Rule(place="step", action=Action.HOLD, until_at_s=10.0, where={"rank": "1"}, at_least={"step": 40})
    assert rule.strikes("step", facts, now_at_s) is strikes
    assert not rule.strikes("stage", facts, now_at_s)
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


def test_a_pattern_finds_the_key_of_one_rank() -> None:
    where = {"op": "upload_file", "key": "checkpoints/*/__1_0.distcp"}
    rule = Rule(place="store", action=Action.HOLD, until_at_s=FAR, where=where)
    assert rule.strikes("store", {"op": "upload_file", "key": "checkpoints/step-0000000005-1/__1_0.distcp"}, 0.0)
    assert not rule.strikes("store", {"op": "upload_file", "key": "checkpoints/step-0000000005-1/__0_0.distcp"}, 0.0)


def test_a_process_is_held_until_the_rule_is_gone_and_leaves_its_mark_before(tmp_path: Path) -> None:
    path = put(tmp_path, "h", Rule(place="step", action=Action.HOLD, until_at_s=FAR))
    passed = threading.Event()
    thread = threading.Thread(target=lambda: (obey(tmp_path, "step", {"rank": 0}), passed.set()), daemon=True)
    thread.start()
    mark = mark_path(tmp_path, "h", 0)
    while not mark.exists():
        assert not passed.wait(0.01)
    assert json.loads(mark.read_text())["facts"] == {"rank": "0"}
    path.unlink()
    assert passed.wait(10)


def test_a_rule_ends_by_itself(tmp_path: Path) -> None:
    put(tmp_path, "h", Rule(place="step", action=Action.HOLD, until_at_s=time.time() + 0.2))
    obey(tmp_path, "step", {})
    assert mark_path(tmp_path, "h", 0).exists()


def test_as_many_as_the_rule_says_are_struck(tmp_path: Path) -> None:
    put(tmp_path, "r", Rule(place="step", action=Action.RAISE, until_at_s=FAR, times=2))
    for _ in range(2):
        with pytest.raises(InjectedFaultError):
            obey(tmp_path, "step", {})
    obey(tmp_path, "step", {})


def test_a_slow_rule_delays_each_passage(tmp_path: Path) -> None:
    put(tmp_path, "s", Rule(place="disk", action=Action.DELAY, until_at_s=FAR, seconds=0.05, times=None))
    before = time.monotonic()
    for _ in range(3):
        obey(tmp_path, "disk", {})
    assert time.monotonic() - before >= 0.15
    assert not (tmp_path / "marks").exists()


def test_a_file_that_is_no_rule_strikes_nobody(tmp_path: Path) -> None:
    path = put(tmp_path, "x", Rule(place="step", action=Action.RAISE, until_at_s=FAR))
    for text in ("", "{}", '{"place": "step"}', '{"action": "explode", "place": "step", "until_at_s": 4e9}'):
        path.write_text(text)
        obey(tmp_path, "step", {})
    assert not (tmp_path / "marks").exists()


def test_a_killed_process_left_its_mark(tmp_path: Path) -> None:
    local_dir = tmp_path / "local"
    put(local_dir / "drills", "k", Rule(place="stage", action=Action.KILL, until_at_s=FAR, where={"rank": "3"}))
    script = (
        "from ray_goodput.gates import gate; gate('stage', rank=2); print('alive', flush=True); gate('stage', rank=3)"
    )
    env = {"RAY_GOODPUT_LOCAL_DIR": str(local_dir), "RAY_GOODPUT_DRILLS": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (-9, "alive\n"), done.stderr
    assert mark_path(local_dir / "drills", "k", 0).exists()


def test_without_the_variable_there_are_no_gates(tmp_path: Path) -> None:
    assert environment({}).drills is False
    assert environment({"RAY_GOODPUT_DRILLS": "1"}).drills is True
    with pytest.raises(ConfigError, match="RAY_GOODPUT_DRILLS='yes'"):
        environment({"RAY_GOODPUT_DRILLS": "yes"})
    assert isinstance(open_store(StoreSpec(uri=str(tmp_path))), LocalStore)


def test_a_store_behind_gates_obeys_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_GOODPUT_DRILLS", "1")
    monkeypatch.setenv("RAY_GOODPUT_LOCAL_DIR", str(tmp_path))
    monkeypatch.setattr("ray_goodput.gates._folder", lambda: tmp_path / "drills")
    store = open_store(StoreSpec(uri=str(tmp_path / "store")))
    where = {"op": "put", "key": "checkpoints/*/COMMIT.json"}
    put(tmp_path / "drills", "r", Rule(place="store", action=Action.RAISE, until_at_s=FAR, where=where))
    store.put("checkpoints/step-1/x", b"1")
    with pytest.raises(InjectedFaultError):
        store.put("checkpoints/step-1/COMMIT.json", b"2")
    assert [info.key for info in store.list()] == ["checkpoints/step-1/x"]
