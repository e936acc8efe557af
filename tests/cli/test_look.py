"""The reading verbs: what they ask, what they print, how they end."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner

from kvd.cli import kvd
from kvd.errors import Code, Refusal
from kvd.wire.admin import (
    AdminFailed,
    AskOtherEnd,
    Because,
    Beside,
    Mark,
    OtherEnd,
    OtherEnds,
    ShowStatus,
    ShowTree,
    Status,
    Tree,
    TreeNode,
    Why,
)
from kvd.wire.snapshot import AuditState, ClientState, Finding, PinState
from tests.cli.sentences import sentence_of

NODES = (
    TreeNode(1, 0, "lora-a", 0, 64, 4, 1, 9, ("lease 7 of decode-0",), (101, 102, 103)),
    TreeNode(2, 1, "lora-a", 64, 96, 2, 0, 3, (), (7, 8, 9)),
)
READING = ("status", "pools", "locks", "rooms", "peers")


def test_status_is_one_screen(run):
    done = run("status")

    lines = done.stdout.splitlines()
    assert done.exit_code == 0
    assert lines[0] == sentence_of("status is one screen")
    assert lines[-3:] == [
        "! prefill-0 is suspect, silent 1.30s: kvd peers",
        "! 2 pages are quarantined, a remote may still write: kvd locks",
        "! a request has waited 1.50s for room: kvd locks",
    ]
    assert len(lines) < 24


def test_status_says_who_has_not_come_back_after_a_restart(run, daemon, snapshot):
    works = ClientState(3, "works-0", (4711,), 12.0, 2, 6, 0, 0, "awaited", 2)
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(
        whole(request), snapshot=msgspec.structs.replace(snapshot, clients=(works,))
    )

    lines = run("status").stdout.splitlines()

    assert [line for line in lines if line.startswith("engines")] == [
        "engines   1  works-0 [4711] awaited"
    ]
    assert (
        "! works-0 of before the restart has not come back for 12.0s, 2 leases with 6 pages wait "
        "for it: kvd locks"
    ) in lines


def test_status_says_the_epochs_where_there_are_any(run, daemon, snapshot):
    assert "epochs" not in run("status").stdout
    whole = daemon.answer
    epochs = {"": 2, "llama": 7, **{f"m{number}": 1 for number in range(9)}}
    daemon.answer = lambda request: msgspec.structs.replace(
        whole(request), snapshot=msgspec.structs.replace(snapshot, epochs=epochs)
    )

    lines = run("status").stdout.splitlines()

    (line,) = [line for line in lines if line.startswith("epochs")]
    assert (
        line == "epochs    11  (no name) 2, llama 7, m0 1, m1 1, m2 1, m3 1, m4 1, m5 1 and 3 more"
    )


def test_status_says_how_the_audit_stands_and_shows_findings_on_top(run, daemon, snapshot):
    found = Finding(
        *("I1", "page-lost", "page 9 is nowhere", "broken", 0, 0, "", 0, 0, 1, (9,), 2.0, 0.1, ())
    )
    state = AuditState(1, 30, 0.4, 0.1, 90, 128, 1.5, 0.006, (found,))
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(
        whole(request), snapshot=msgspec.structs.replace(snapshot, audit=state)
    )

    lines = run("status").stdout.splitlines()

    assert lines[0] == sentence_of("status says how the audit stands and shows findings on top")
    assert [line for line in lines if line.startswith("audit")] == [
        "audit     1 finding; the last sweep took 0.40s, ended 0.10s ago; 0.60 % of a core"
    ]


def test_pools_says_where_pages_are_only_counted(run, daemon, snapshot):
    pool = msgspec.structs.replace(
        snapshot.pools[0], page_bytes=0, placeholder_bytes=32768, total_pages=129, page_size=16
    )
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(
        whole(request), snapshot=msgspec.structs.replace(snapshot, pools=(pool,))
    )

    assert (
        "2048 tokens are counted, no byte is held; a placeholder of one page has 32.0 KiB"
        in " ".join(run("pools").stdout.split())
    )


@pytest.mark.parametrize("verb", READING)
def test_reading_verbs_ask_once_and_print_nothing_to_stderr(run, daemon, verb):
    done = run(verb)

    assert (done.exit_code, done.stderr) == (0, "")
    assert daemon.asked == [ShowStatus(0)]


@pytest.mark.parametrize(
    ("verb", "part"),
    [("status", None), ("pools", "pools"), ("rooms", "rooms"), ("peers", "peers")],
)
def test_json_is_the_wire_value_alone_on_stdout(run, snapshot, verb, part):
    done = run(verb, "--format", "json")

    whole = msgspec.to_builtins(snapshot)
    assert json.loads(done.stdout) == json.loads(json.dumps(whole if part is None else whole[part]))


def test_locks_json_has_leases_and_the_queue(run, snapshot):
    done = run("locks", "--format", "json")

    expected = {"leases": snapshot.leases, "waiting": snapshot.waiting}
    assert json.loads(done.stdout) == json.loads(json.dumps(msgspec.to_builtins(expected)))


def test_pools_say_that_the_pages_add_up(run):
    done = run("pools")

    assert done.stdout.splitlines() == [
        "POOL     TOTAL  FREE  HELD  CACHED  LOCKED  EVICTABLE  QUAR  SUM",
        "main/kv    128    87    10      28       8         20     2  ok",
        "    [HHCCCCCCCQ......................] 16 tokens, 2.0 MiB a page",
    ]


def test_pools_show_the_saved_area_beside_them(run, daemon, snapshot):
    pool = msgspec.structs.replace(snapshot.pools[0], saved_pages=9, saved_capacity_pages=12)
    changed = msgspec.structs.replace(snapshot, pools=(pool,))
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)

    done = run("pools")

    assert done.stdout.splitlines()[3] == sentence_of("pools show the saved area beside them")


def test_locks_say_since_when_a_lease_is_retracted_and_how_much_is_saved(run, daemon, snapshot):
    lease = msgspec.structs.replace(
        snapshot.leases[0],
        state="retracted",
        held_pages=0,
        saved_pages=9,
        saved_bytes=9 * 2**21,
        retracted_s=61.0,
        waiting_for="its engine to resume or release it",
    )
    changed = msgspec.structs.replace(snapshot, leases=(lease,))
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=changed)

    done = run("locks")

    assert done.stdout.splitlines()[2] == sentence_of(
        "locks say since when a lease is retracted and how much is saved"
    )


def test_pools_say_that_a_page_is_missing(run, daemon, snapshot):
    short = msgspec.structs.replace(snapshot.pools[0], free_pages=86)
    broken = msgspec.structs.replace(snapshot, pools=(short,))
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=broken)

    done = run("pools")

    assert done.stdout.splitlines()[1].endswith("WRONG: 127 of 128; kvd audit")


def test_locks_name_owner_process_reason_room_pages_and_age(run, hostile):
    """scenario A40: whoever holds a lock is named."""
    done = run("locks")

    lines = done.stdout.splitlines()
    assert lines[1].split() == [
        *("7", "held", f"{hostile[1]}[4711]", "receive", "9117", "64/160", "6", "0", "1m35s"),
    ]
    assert lines[2] == sentence_of("locks name owner process reason room pages and age 1")
    assert lines[3].startswith("WAITING")
    assert lines[5] == sentence_of("locks name owner process reason room pages and age 2")


def test_names_chosen_by_others_cannot_steer_the_terminal(run, hostile):
    done = run("locks")

    assert hostile[1] in done.stdout
    assert all(char.isprintable() or char == "\n" for char in done.stdout)


def test_rooms_show_progress_and_with_v_the_story(run):
    plain, told = run("rooms"), run("rooms", "-v")

    assert plain.stdout.splitlines()[1:] == [
        "9117  decode  receiving  prefill-0  64/160  3/6 50%  0.25s    29.8s",
        "    part 1 of decode-0; 6.0 MiB of 12.0 MiB; waits for prefill-0 to write 3 more pages",
    ]
    assert told.stdout.splitlines()[-3:] == [
        "room 9117 decode part 1, handoff 41, lease 7, 1 posts outstanding",
        "  QUEUED -> OFFERED: admitted",
        "  OFFERED -> RECEIVING: accept",
    ]


def test_rooms_say_which_part_of_a_prompt_a_source_sends(run, daemon, snapshot):
    part = msgspec.structs.replace(snapshot.rooms[0], share="part 2 of 3, pages 4..8")
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(
        whole(request), snapshot=msgspec.structs.replace(snapshot, rooms=(part,))
    )

    assert "part 1 of decode-0; part 2 of 3, pages 4..8; 6.0 MiB of" in run("rooms").stdout


def test_peers_show_the_link(run):
    assert run("peers").stdout.splitlines() == [
        "PEER       STATE    SILENT      RTT  RECEIVES  SENDS  AGENT",
        "prefill-0  suspect   1.30s  0.41 ms         1      0  loaded",
        "    tcp://127.0.0.1:7402, incarnation aaaaaaaa, generation 2",
        "    layout " + "f" * 32,
    ]


def test_peers_show_a_difference_of_layouts_whole(run, daemon, snapshot):
    why = "prefill-0 and decode-0 lay out their pools differently: layers: ours 32, theirs 80"
    [peer] = snapshot.peers
    refused = msgspec.structs.replace(peer, layout=why)
    daemon.answer = lambda _: Status(0, msgspec.structs.replace(snapshot, peers=(refused,)))

    assert run("peers").stdout.splitlines()[-1] == f"    layout {why}"


def test_peers_show_why_a_handshake_fails(run, daemon, snapshot):
    [peer] = snapshot.peers
    unknown = msgspec.structs.replace(peer, trouble="its key is another")
    daemon.answer = lambda _: Status(0, msgspec.structs.replace(snapshot, peers=(unknown,)))

    assert run("peers").stdout.splitlines()[-1] == sentence_of("peers show why a handshake fails")


def test_tree_is_indented_and_says_what_it_left_out(run, daemon):
    daemon.answer = lambda _request: Tree(0, NODES, 5)

    done = run("tree", "--limit", "2")

    assert daemon.asked == [ShowTree(0, 2)]
    assert done.stdout.splitlines() == [
        "NODE          TOKENS  PAGES  HITS  LOCKS  BEGINS WITH",
        "1 [lora-a]    0..64       4     9      1  101 102 103",
        "    locked by lease 7 of decode-0",
        "  2 [lora-a]  64..96      2     3      0  7 8 9",
        "... and 3 nodes more: --limit 5",
    ]


def test_tree_json_counts_all_nodes(run, daemon):
    daemon.answer = lambda _request: Tree(0, NODES, 5)

    done = run("tree", "--format", "json")

    assert json.loads(done.stdout)["total"] == 5
    assert [node["id"] for node in json.loads(done.stdout)["nodes"]] == [1, 2]


@pytest.mark.parametrize("kind", ["page", "node", "lease", "receive", "send", "client"])
def test_why_gives_the_sentence_then_the_facts(run, daemon, kind):
    daemon.answer = lambda _request: Because(
        0,
        "decode-0 holds it.",
        ("since 3 s", "room 9117"),
        ("lease:7", "client:2"),
        (Mark(2.5, "queued -> offered (admitted)"),),
    )

    table, asjson = run("why", kind, "17"), run("why", kind, "17", "--format", "json")

    assert daemon.asked == [Why(0, kind, 17)] * 2
    assert table.stdout == (
        "decode-0 holds it.\n  since 3 s\n  room 9117\n  see also lease:7, client:2\n"
    )
    assert json.loads(asjson.stdout) == {
        "sentence": "decode-0 holds it.",
        "facts": ["since 3 s", "room 9117"],
        "links": ["lease:7", "client:2"],
        "marks": [{"ago_s": 2.5, "what": "queued -> offered (admitted)"}],
        "other_ends": [],
        "not_asked": "",
    }


def test_why_takes_a_peer_by_its_name(run, daemon):
    daemon.answer = lambda _request: Because(0, "peer 12:b is up", ())

    done = run("why", "peer", "12:b")

    assert (done.exit_code, done.stdout) == (0, "peer 12:b is up\n")
    assert daemon.asked == [Why(0, "peer", 0, "", "12:b")]


def test_why_evicted_takes_no_id_and_all_others_need_one(run, daemon):
    daemon.answer = lambda _request: Because(0, "nothing was evicted", ())

    done, with_id, without = run("why", "evicted"), run("why", "evicted", "1"), run("why", "page")

    assert (done.exit_code, done.stdout) == (0, "nothing was evicted\n")
    assert daemon.asked == [Why(0, "evicted", 0)]
    assert (with_id.exit_code, without.exit_code) == (2, 2)
    assert "which page? kvd why page ID" in without.stderr


def test_pin_without_a_node_shows_the_pins(run, daemon, snapshot):
    pin = PinState(
        pin=3,
        owner="system prompt",
        session=2,
        lease=7,
        namespace="llama",
        tokens=4096,
        pages=256,
        age_s=61.0,
        ttl_s=600.0,
    )
    bare = run("pin")
    daemon.answer = lambda _request: Status(0, msgspec.structs.replace(snapshot, pins=(pin,)))

    head, row = run("pin").stdout.splitlines()

    assert bare.stdout == "no pins\n"
    columns = "PIN OWNER NAMESPACE TOKENS PAGES TIER AGE ENDS IN"
    assert head.split() == columns.split()
    assert row.split()[:6] == ["3", "system", "prompt", "llama", "4096", "256"]
    assert run("pin", "node").exit_code == 2


ENDS = (
    OtherEnd(
        *("receive:4", "prefill-0", "prefill", "streaming", "the engine to compute"),
        *(100, 64, 128, 896, 1, 29.5, (Mark(0.25, "await-engine -> streaming"),), 0.0004),
    ),
    OtherEnd("send:2", "decode-1", "decode", why_none="it has not answered within 1 s"),
)


def of_a_room(ends):
    """The daemon's answers about room 17, and about its other ends."""
    return lambda request: (
        ends if isinstance(request, AskOtherEnd) else Because(0, "prefill-0 holds it.", ())
    )


def test_why_room_tells_the_other_ends_too(run, daemon):
    daemon.answer = of_a_room(OtherEnds(0, ENDS))

    table, asjson = run("why", "room", "17"), run("why", "room", "17", "--format", "json")

    assert daemon.asked == [Why(0, "room", 17), AskOtherEnd(0, 17)] * 2
    assert table.stdout.splitlines() == [
        "prefill-0 holds it.",
        "at the other end of receive 4, prefill-0: streaming on the prefill side, waits for the "
        "engine to compute; heard in 0.4 ms",
        "  prompt 100 tokens, decode_prefix_len 64, 128 B of 896 B moved, 1 posts under way, "
        "29.5 s to its deadline",
        "  0.250 s ago: await-engine -> streaming",
        "at the other end of send 2, decode-1: it has not answered within 1 s",
    ]
    first, second = json.loads(asjson.stdout)["other_ends"]
    assert first["marks"] == [{"ago_s": 0.25, "what": "await-engine -> streaming"}]
    assert (first["state"], second["why_none"]) == ("streaming", ENDS[1].why_none)


def test_why_room_is_answered_though_the_other_end_cannot_be_asked(run, daemon):
    refusal = Refusal(Code.BAD_REQUEST, "no message of this socket")
    daemon.answer = of_a_room(AdminFailed(0, refusal))

    done = run("why", "room", "17")

    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "prefill-0 holds it.",
        "the other end was not asked: no message of this socket (bad-request)",
    ]


def test_why_names_a_page_of_another_component_with_it(run, daemon):
    daemon.answer = lambda _request: Because(0, "decode-0 holds it.", ())

    done = run("why", "page", "swa:17")

    assert (done.exit_code, done.stdout) == (0, "decode-0 holds it.\n")
    assert daemon.asked == [Why(0, "page", 17, "swa")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("page", "swa:x"), "'swa:x' is no number"),
        (("page", "-1"), "No such option"),
        (("page", str(2**63)), "is no number"),
        (("lease", "swa:17"), "a lease has no component: kvd why lease 17"),
        (("client", "decode-0"), "'decode-0' is no number"),
    ],
)
def test_why_refuses_what_is_no_number_and_components_of_anything_but_pages(run, words, said):
    done = run("why", *words)

    assert done.exit_code == 2
    assert said in done.stderr


def test_tree_shows_tombstones_and_what_is_locked_beside_the_first_component(run, daemon):
    nodes = (
        msgspec.structs.replace(NODES[0], beside=(Beside("swa", 0, 0),)),
        msgspec.structs.replace(NODES[1], beside=(Beside("swa", 2, 1), Beside("state", 1, 0))),
    )
    daemon.answer = lambda _request: Tree(0, nodes, 2)

    assert run("tree").stdout.splitlines() == [
        "NODE          TOKENS  PAGES  HITS  LOCKS  SWA         STATE  BEGINS WITH",
        "1 [lora-a]    0..64       4     9      1  tombstone   -      101 102 103",
        "    locked by lease 7 of decode-0",
        "  2 [lora-a]  64..96      2     3      0  2, locks 1  1      7 8 9",
    ]


def test_an_empty_node_says_so(run, daemon, snapshot):
    empty = msgspec.structs.replace(
        snapshot, leases=(), waiting=(), rooms=(), peers=(), clients=(), pools=()
    )
    whole = daemon.answer
    daemon.answer = lambda request: msgspec.structs.replace(whole(request), snapshot=empty)

    assert run("locks").stdout == "no leases\n"
    assert run("rooms").stdout == "no rooms\n"
    assert run("pools").stdout == "no pools\n"
    assert run("peers").stdout == "no peers: name them in peers.connect\n"
    assert run("status").exit_code == 0


@pytest.mark.parametrize("verb", [*READING, "tree", "events", "audit", "flush", "fence"])
def test_no_daemon_ends_with_3(tmp_path, verb):
    nobody = f"ipc://{tmp_path}/nobody.sock"

    done = CliRunner().invoke(kvd, [verb, "--connect", nobody, "--timeout", "0.1"])

    assert (done.exit_code, done.stdout) == (3, "")
    assert nobody in done.stderr
    assert "kvd serve" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_refusal_ends_with_1_and_one_sentence(run, daemon, form):
    refusal = Refusal(Code.BAD_REQUEST, "there is no page 99, pages are 1 to 63", side="node-a")
    daemon.answer = lambda _request: AdminFailed(0, refusal)

    done = run("why", "page", "99", "--format", form)

    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == ("Error: node-a: there is no page 99, pages are 1 to 63 (bad-request)\n")


def test_an_answer_to_another_question_ends_with_1(run, daemon):
    daemon.answer = lambda _request: Because(0, "", ())

    done = run("status")

    assert done.exit_code == 1
    assert "answered Because where Status was due" in done.stderr


def test_the_daemon_is_found_through_its_own_configuration(daemon, tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text(f'[sockets]\nadmin = "{daemon.endpoint}"\n')

    done = CliRunner().invoke(kvd, ["status", "--config", str(file)])

    assert done.exit_code == 0, done.stderr


def test_a_wrong_configuration_ends_with_78_and_every_error(tmp_path):
    file = tmp_path / "kvd.toml"
    file.write_text("[pool]\npages = 1\nlayers = 0\n")

    done = CliRunner().invoke(kvd, ["status", "--config", str(file)])

    assert (done.exit_code, done.stdout) == (78, "")
    assert "pool.pages" in done.stderr
    assert "pool.layers" in done.stderr
