"""The NIC script, run by bash against stand-ins of the vendor's tools that keep their settings in files."""

import os
import subprocess

import pytest

from bywash.fabric.config.audit_model import nic_facts
from bywash.fabric.config.nic import nic_script, servers, type_of_service
from tests.fabric_config.samples import plan_of

MLNX_QOS = r"""#!/usr/bin/env python3
import json, pathlib, sys
args = sys.argv[1:]
file = pathlib.Path(__file__).parent / f"state-{args[1]}.json"
state = json.loads(file.read_text()) if file.exists() else {"trust": "pcp", "pfc": "0,0,0,0,0,0,0,0", "codes": {}}
for flag, value in zip(args[2::2], args[3::2]):
    if flag == "--trust": state["trust"] = value
    elif flag == "--pfc": state["pfc"] = value
    elif flag == "--dscp2prio":
        _, code, priority = value.split(",")
        state["codes"][code] = int(priority)
    else: sys.exit(f"unknown flag {flag}")
file.write_text(json.dumps(state))
if len(args) == 2:
    print("DCBX mode: OS controlled\nPriority trust state: " + state["trust"])
    print("dscp2prio mapping:")
    for priority in range(8):
        codes = [c for c in range(64) if state["codes"].get(str(c), c // 8) == priority]
        print(f"\tprio:{priority} dscp:" + "".join(f"{c:02d}," for c in reversed(codes)))
    print("Cable len: 5\nPFC configuration:\n\tpriority    0   1   2   3   4   5   6   7")
    print("\tenabled     " + "   ".join(state["pfc"].split(",")))
"""
CMA = r"""#!/usr/bin/env bash
file=$(dirname "$0")/tos-$2
if [[ $# == 4 ]]; then echo "$4" > "$file"; else cat "$file" 2>/dev/null || echo 0; fi
"""
MLXREG = r"""#!/usr/bin/env bash
file=$(dirname "$0")/accl-$2
touch "$file"
if [[ $5 == --get ]]; then
  for name in roce_adp_retrans_en adaptive_routing_forced_en; do
    grep -q "^$name=0x1" "$file" && echo "$name | 0x00000001" || echo "$name | 0x00000000"
  done
else
  grep -v "^${6%%=*}=" "$file" > "$file.new" || true
  echo "$6" >> "$file.new"; mv "$file.new" "$file"
fi
"""
IP = r"""#!/usr/bin/env bash
echo "${6}" > "$BYWASH_SYS/class/net/${4}/mtu"
"""


@pytest.fixture(params=[1])
def server(tmp_path, request):
    """A server with a NIC or two: tools on PATH, a sysfs tree, the script; returns a function that runs it."""
    plan = plan_of("rail-mixed")
    tools, sys_tree = tmp_path / "bin", tmp_path / "sys"
    tools.mkdir()
    for name, text in (("mlnx_qos", MLNX_QOS), ("cma_roce_tos", CMA), ("mlxreg", MLXREG), ("ip", IP)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    mine = servers(plan)[0][: request.param]
    for nic in mine:
        for side in ("np", "rp"):
            ecn = sys_tree / "class/net" / nic.interface / "ecn" / f"roce_{side}"
            (ecn / "enable").mkdir(parents=True)
            (ecn / "enable" / "3").write_text("0\n")
        for name in ("cnp_dscp", "cnp_802p_prio", "min_time_between_cnps"):
            (sys_tree / "class/net" / nic.interface / "ecn/roce_np" / name).write_text("0\n")
        for name in ("dce_tcp_g", "rpg_time_reset", "rpg_ai_rate"):  # this driver has not all of them
            (sys_tree / "class/net" / nic.interface / "ecn/roce_rp" / name).write_text("5\n")
        (sys_tree / "class/net" / nic.interface / "mtu").write_text("1500\n")
        port = sys_tree / "class/infiniband" / nic.device / "tc/1"
        port.mkdir(parents=True)
        (port / "traffic_class").write_text("Global tclass=0\n")
    script = tmp_path / "nic.sh"
    script.write_text(nic_script(plan, mine))

    def run(*args):
        environment = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "BYWASH_SYS": str(sys_tree),
            "BYWASH_KEPT": str(tmp_path / "kept.undo"),
        }
        done = subprocess.run(["bash", script, *args], capture_output=True, text=True, env=environment, timeout=200)
        return done

    run.tree = tmp_path
    return run


def snapshot(server):
    """Every setting there is, as text. A tclass is written as a number and read with words before it."""
    files = sorted([*(server.tree / "sys").rglob("*"), *(server.tree / "bin").glob("tos-*")])
    return {str(file): file.read_text().split("=")[-1].strip() for file in files if file.is_file()}


def test_dry_run_says_and_does_nothing(server):
    before = snapshot(server)
    done = server("--dry-run")
    assert done.returncode == 0, done.stderr
    assert "change   trust:eth0: pcp -> dscp" in done.stdout
    assert "change   pfc:eth0: 0,0,0,0,0,0,0,0 -> 0,0,0,1,0,0,0,0" in done.stdout
    assert snapshot(server) == before
    assert not (server.tree / "kept.undo").exists()


def test_apply_twice_changes_once_and_undo_puts_back(server):
    before = snapshot(server)
    first = server()
    assert first.returncode == 0, first.stderr
    assert "change   tos:mlx5_0: 0 -> 106" in first.stdout
    assert "absent   sys:eth0:class/net/eth0/ecn/roce_rp/rpg_hai_rate" in first.stdout
    second = server()
    assert second.returncode == 0, second.stderr
    assert "change" not in second.stdout
    assert second.stdout.count("ok ") == first.stdout.count("change ") + first.stdout.count("ok ")
    undone = server("--undo")
    assert undone.returncode == 0, undone.stderr
    after = snapshot(server)
    assert {key: after[key] for key in before} == before
    assert "Priority trust state: pcp" in server("--show").stdout
    assert "nothing to undo" in server("--undo").stdout


@pytest.mark.parametrize("server", [2], indirect=True)
def test_what_it_shows_is_what_the_audit_reads(server):
    server()
    facts = nic_facts("server0", server("--show").stdout)
    assert [nic.name for nic in facts] == ["server0:eth0", "server0:eth1"]
    one = facts[0]
    assert (one.trust, one.pfc, one.mtu) == ("dscp", (3,), 9000)
    assert (one.priority_of_dscp[26], one.priority_of_dscp[48]) == (3, 6)
    assert one.values["cnp_dscp"] == "48"
    assert one.values["traffic_class"] == one.values["cma_roce_tos"] == str(type_of_service(26)) == "106"
    assert one.values["out_of_order"] == "1"


def test_a_wrong_option_is_refused(server):
    done = server("--frob")
    assert done.returncode == 2
    assert "usage" in done.stderr
