from __future__ import annotations

import gzip
import json
import math
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kpolicy.errors import ConfigError, TraceError
from kpolicy.scheduling import traces as traces_module
from kpolicy.scheduling.traces import (
    DEFAULT_FILE,
    DROP_REASONS,
    TRACES_VARIABLE,
    Trace,
    TraceRequest,
    default_path,
    default_trace,
    read_trace,
)
from tests.scheduling import burstiness, figures, real_file

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
MOONCAKE = "timestamp,input_length,output_length,hash_ids\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
BURSTGPT_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(folder: Path, content: str | bytes, name: str = "trace") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Small traces whose times are whole milliseconds, often repeated."""
    rows = draw(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 5000), st.integers(1, 900)), max_size=40))
    time = 0
    requests = []
    for index, (gap, prompt, output) in enumerate(rows):
        time += gap if gap % 3 and index else 0
        requests.append(TraceRequest(index, time / 1000, prompt, output, tuple(range(prompt % 4))))
    return Trace("drawn", "generated", requests, {"failed_request": 2})


# The figures that the publishers' files had when they were fetched, from the table beside them.
@pytest.mark.parametrize(
    ("name", "kind", "rows", "span", "prompt", "output", "burst"),
    [
        (DEFAULT_FILE, "azure", 19366, 3502, (1155, 1020, 4083, 14050), (211, 129, 451, 1000), 1.4),
        ("azure_llm_2023_code.csv", "azure", 8819, 3436, (2048, 1469, 7303, 7437), (28, 13, 90, 1899), 13.2),
        (
            "mooncake_conversation.csv.gz",
            "mooncake",
            12031,
            3537,
            (12035, 6909, 39550, 126195),
            (343, 350, 698, 2000),
            7.9,
        ),
        ("burstgpt_1_first400.csv", "burstgpt", 400, 37269, (520, 314, 1637, 2126), (277, 229, 813, 2019), 1.0),
    ],
)
def test_real_files_have_their_published_figures(name, kind, rows, span, prompt, output, burst):
    """Rows, span, lengths and burstiness of each real file are the published ones, failed rows counted as zeros."""
    trace = read_trace(real_file(name))
    failed = trace.dropped.get("failed_request", 0)
    assert trace.format == kind
    assert len(trace) + failed == rows
    assert trace.span_s == pytest.approx(span, abs=0.5)
    zeros = [0] * failed
    assert figures([one.prompt_tokens for one in trace.requests] + zeros) == pytest.approx(prompt, abs=1)
    assert figures([one.output_tokens for one in trace.requests] + zeros) == pytest.approx(output, abs=1)
    assert burstiness(trace) == pytest.approx(burst, abs=0.06)


def test_real_burstgpt_drops_its_failed_requests():
    """The 17 failed requests among BurstGPT's first 400 rows are dropped by name, and nothing else is."""
    trace = read_trace(real_file("burstgpt_1_first400.csv"))
    assert dict(trace.dropped) == {"failed_request": 17}
    assert len(trace) == 383


def test_real_mooncake_has_an_id_for_each_512_tokens():
    """Every prompt of the Mooncake file has one hash id for each started block of 512 tokens."""
    trace = read_trace(real_file("mooncake_conversation.csv.gz"))
    assert all(len(one.hash_ids) == math.ceil(one.prompt_tokens / 512) for one in trace.requests)


def test_azure_times_are_exact_and_cross_midnight(tmp_path):
    """Seven decimals, carriage returns, a change of year and a last line without an end are read exactly."""
    rows = "2023-12-31 23:59:59.9999999,5,6\r\n2024-01-01 00:00:00.0000001,7,8\r\n2024-01-02 00:00:00,9,10"
    trace = read_trace(written(tmp_path, AZURE + rows))
    assert trace.requests == (
        TraceRequest(0, 0.0, 5, 6),
        TraceRequest(1, 2e-7, 7, 8),
        TraceRequest(2, 86400.0000001, 9, 10),
    )


def test_azure_times_may_have_a_zone(tmp_path):
    """The 2024 files' zone suffix, with or without decimals, is taken into account."""
    rows = "2024-05-10 00:00:00+00:00,5,6\n2024-05-10 00:00:01.500000+00:00,5,6\n2024-05-10 02:00:02+02:00,5,6\n"
    trace = read_trace(written(tmp_path, AZURE + rows))
    assert [one.arrival_s for one in trace.requests] == [0, 1.5, 2]


def test_mooncake_csv_equals_json_lines(tmp_path):
    """The two forms of a Mooncake trace give the same requests, in seconds from the first row."""
    table = written(tmp_path, MOONCAKE + "500,600,9,4 5\n500,10,3,\n2750,1025,20,4 5 6\n", "csv")
    rows = [(500, 600, 9, [4, 5]), (500, 10, 3, []), (2750, 1025, 20, [4, 5, 6])]
    names = MOONCAKE.strip().split(",")
    objects = written(tmp_path, "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows), "jsonl")
    left, right = read_trace(table), read_trace(objects)
    assert left.requests == right.requests
    assert [one.arrival_s for one in left.requests] == [0, 0, 2.25]
    assert left.requests[2].hash_ids == (4, 5, 6)
    assert (left.format, right.format) == ("mooncake", "mooncake-jsonl")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces())
def test_any_trace_reads_back(tmp_path, trace):
    """A trace written as Mooncake CSV or JSON lines reads back as the same requests."""
    rows = [(round(one.arrival_s * 1000), one.prompt_tokens, one.output_tokens, one.hash_ids) for one in trace.requests]
    if not rows:
        return
    table = "".join(f"{time},{prompt},{output},{' '.join(map(str, ids))}\n" for time, prompt, output, ids in rows)
    names = MOONCAKE.strip().split(",")
    objects = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
    assert read_trace(written(tmp_path, MOONCAKE + table)).requests == trace.requests
    assert read_trace(written(tmp_path, objects)).requests == trace.requests


def test_columns_are_found_by_name(tmp_path):
    """Order, quotes and further columns make no difference: BurstGPT's third file reads like its first."""
    first = written(tmp_path, BURSTGPT + "5,GPT-4,472,18,490,API log\n9,GPT-4,1,2,3,API log\n", "1")
    third = written(tmp_path, BURSTGPT_3 + '5.0,,43,GPT-4,472,18,490,API log\n9.0,"a,b",2,GPT-4,"1",2,3,API log\n', "3")
    mixed = written(tmp_path, '"Response tokens",x,Timestamp,Request tokens\n18,,5,472\n2,,9,1\n', "mixed")
    assert read_trace(first).requests == (TraceRequest(0, 0.0, 472, 18), TraceRequest(1, 4.0, 1, 2))
    assert read_trace(third).requests == read_trace(mixed).requests == read_trace(first).requests


def test_gzip_is_recognised_by_its_first_bytes(tmp_path):
    """Gzipped and plain files read alike whatever their names, in several members, with a byte order mark or not."""
    text = (MOONCAKE + "0,5,6,1\n").encode(), b"7,5,6,1\n"
    plain = read_trace(written(tmp_path, b"\xef\xbb\xbf" + text[0] + text[1], "trace.gz"))
    zipped = written(tmp_path, gzip.compress(b"\xef\xbb\xbf" + text[0]) + gzip.compress(text[1]), "trace.csv")
    assert len(plain) == 2
    assert read_trace(zipped).requests == plain.requests


@pytest.mark.parametrize(
    ("content", "dropped"),
    [
        (AZURE + "2023-11-16 18:00:00.0,0,4\n2023-11-16 18:00:01.0,3,4\n", {"zero_prompt_tokens": 1}),
        (MOONCAKE + "0,3,0,\n1,0,0,\n2,0,4,\n3,3,4,\n", {"zero_output_tokens": 1, "zero_prompt_tokens": 2}),
        (
            BURSTGPT + "0,G,0,0,0,L\n1,G,9,0,9,L\n2,G,0,9,9,L\n5,G,3,4,7,L\n",
            {"failed_request": 2, "zero_prompt_tokens": 1},
        ),
    ],
)
def test_rows_without_tokens_are_dropped_by_name(tmp_path, content, dropped):
    """Rows without tokens are counted by reason; the others keep their row numbers and times."""
    trace = read_trace(written(tmp_path, content))
    assert dict(trace.dropped) == dropped
    assert [(one.prompt_tokens, one.output_tokens) for one in trace.requests] == [(3, 4)]
    assert trace.requests[0].index == sum(dropped.values())
    assert trace.requests[0].arrival_s > 0


JSON_ROW = '{"timestamp": 3, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        (b"", None, "empty"),
        (b"\n\r\n", None, "empty"),
        (AZURE, 1, "no rows"),
        ("a,b\n1,2\n", 1, r"unknown columns \(found: a, b\).*azure \(TIMESTAMP.*mooncake \(.*burstgpt \("),
        (AZURE.lower() + "2023-11-16 18:00:00.0,1,1\n", 1, "capitals as written"),
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:00:00.0,1\n",
            1,
            r"missing GeneratedTokens of azure \(found: TIMESTAMP, C",
        ),
        (AZURE.strip() + ",timestamp,input_length,output_length\n", 1, "azure and mooncake"),
        (MOONCAKE.strip() + ",timestamp\n1,1,1,,1\n", 1, "timestamp stands twice"),
        ("TIMESTAMP".encode("utf-16"), 1, "isn't UTF-8"),
        (MOONCAKE.encode() + b"0,1,1,\n0,1,\xff,\n", 3, "0xff isn't UTF-8"),
        (AZURE + "2023-11-16 18:00:00.0,1,1\r\n2023-11-16 18:0", 3, "1 fields .* header has 3.*cut short"),
        (AZURE + "2023-11-16 18:00:00.0,1,1,1\r\n", 2, "4 fields .* header has 3"),
        (AZURE + "2023-11-16 18:00:00.0,1,\r\n", 2, "GeneratedTokens is ''"),
        (AZURE + "2023-02-29 18:00:00.0,1,1\r\n", 2, "TIMESTAMP is '2023-02-29.*date and time such as"),
        (AZURE + "2023-11-16 24:00:00.0,1,1\r\n", 2, "TIMESTAMP is"),
        (AZURE + "17,1,1\r\n", 2, "TIMESTAMP is '17'"),
        (MOONCAKE + "0,1,1,\n\n1,1,1,\n", 3, "1 fields"),
        (MOONCAKE + "0,-4,1,\n", 2, "input_length is '-4'; it must be a whole number of tokens from 0 to 2147483647"),
        (MOONCAKE + "0,4.0,1,\n", 2, "input_length is '4.0'"),
        (MOONCAKE + "0,1_0,1,\n", 2, "input_length is '1_0'"),
        (MOONCAKE + f"0,{2**31 - 1},1,\n0,1,{2**31},\n", 3, "output_length is 2147483648"),
        (MOONCAKE + f"0,{'9' * 5000},1,\n", 2, "input_length is '9"),
        (MOONCAKE + "0,1,1,1 x\n", 2, "hash_ids is '1 x'"),
        (MOONCAKE + "-1,1,1,\n", 2, "timestamp is '-1'"),
        (MOONCAKE + f"{'9' * 30},1,1,\n", 2, "timestamp is"),
        (MOONCAKE + "0,1024,1,1 2\n1,1024,1,3", 3, "last line has no end and only 1 hash_ids for 1024"),
        (MOONCAKE + "0,1024,1,1 2\n1,1024,1,", 3, "last line has no end and only 0 hash_ids"),
        (BURSTGPT + "nan,G,1,1,2,L\n", 2, "Timestamp is 'nan'"),
        (BURSTGPT + '1,"G,1,1,2,L\n', 2, "quoted field"),
        (JSON_ROW + "7\n", 2, "JSON int"),
        (f"[{JSON_ROW.strip()}]\n", 1, "JSON list"),
        (JSON_ROW + JSON_ROW[:30], 2, "cut short"),
        (JSON_ROW + "\n" + JSON_ROW, 2, "whole JSON object"),
        ("[" * 100_000, 1, "whole JSON object"),
        ('{"timestamp": 0, "input_length": 3}\n', 1, r"missing output_length \(found: timestamp, input_length\)"),
        (JSON_ROW + JSON_ROW.replace("5", "true"), 2, "input_length is True"),
        (JSON_ROW + JSON_ROW.replace("5", '"5x"'), 2, "input_length is '5x'"),
        (JSON_ROW + JSON_ROW.replace("3,", "NaN,"), 2, "timestamp is nan"),
        (JSON_ROW + JSON_ROW.replace("[1]", "[1.5]"), 2, "hash_ids is"),
        (JSON_ROW + JSON_ROW.replace("[1]", "{}"), 2, "hash_ids is"),
    ],
)
def test_a_bad_file_names_its_line(tmp_path, content, line, problem):
    """Each way a file can be wrong is an error with the path, the right line and the next step."""
    path = written(tmp_path, content)
    with pytest.raises(TraceError, match=problem) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("content", "line", "times", "how"),
    [
        (AZURE + "2023-11-16 18:00:01.1,1,1\n2023-11-16 18:00:01.0,1,1\n", 3, ("01.1", "01.0"), "sort -s -t, -k1,1)"),
        ("input_length,output_length,timestamp\n0,0,9\n1,1,10\n1,1,8\n", 4, ("10", "8"), "sort -s -t, -k3,3n)"),
        (BURSTGPT + "5,G,0,0,0,L\n4,G,1,1,2,L\n", 3, ("5", "4"), "-k1,1n"),
        (JSON_ROW + JSON_ROW.replace("3,", "2,", 1), 2, ("3", "2"), "jq -sc"),
    ],
)
def test_unsorted_times_are_refused(tmp_path, content, line, times, how):
    """Times that go back, even from a dropped row, name both times, the line and a command that sorts."""
    with pytest.raises(TraceError, match="goes back from") as caught:
        read_trace(written(tmp_path, content))
    assert caught.value.line == line
    assert f"{times[0]} to " in str(caught.value)
    assert f"{times[1]}. Sort" in str(caught.value)
    assert how in str(caught.value)


def test_gzip_is_unzipped_in_pieces_up_to_a_bound(tmp_path, monkeypatch):
    """Each piece is handed over once however many members there are, and a small file can't take all memory."""
    rows = [f"{at},1,1,\n".encode() for at in range(300)]
    file = written(tmp_path, gzip.compress(MOONCAKE.encode()) + b"".join(map(gzip.compress, rows)) + b"\0" * 5)
    fed = []

    class Counted:
        def __init__(self, wbits):
            self.real = zlib.decompressobj(wbits=wbits)

        def __getattr__(self, name):
            return getattr(self.real, name)

        def decompress(self, piece):
            fed.append(len(piece))
            return self.real.decompress(piece)

    monkeypatch.setattr(traces_module, "_PIECE", 64)
    monkeypatch.setattr(traces_module, "zlib", SimpleNamespace(decompressobj=Counted, error=zlib.error))
    assert len(read_trace(file)) == 300
    assert max(fed) == 64
    monkeypatch.setattr(traces_module, "MOST_LINES_BYTES", 1 << 20)
    bomb = written(tmp_path, gzip.compress(MOONCAKE.encode() + b"0,1,1,\n" * (1 << 18)))
    with pytest.raises(TraceError, match="it unzips to over 1 MiB"):
        read_trace(bomb)


def test_a_cut_gzip_names_the_line_it_was_cut_at(tmp_path):
    """A gzip file without its end is an error at the line where the data stops."""
    packer = zlib.compressobj(wbits=31)
    four_lines = packer.compress((MOONCAKE + "0,1,1,\n1,1,1,\n2,1,1,\n").encode()) + packer.flush(zlib.Z_SYNC_FLUSH)
    with pytest.raises(TraceError, match=r"cut short here, 0\.0 s into the trace; fetch the file again") as caught:
        read_trace(written(tmp_path, four_lines))
    assert caught.value.line == 5
    for rows in (0, 1):
        header = packed(MOONCAKE[: len(MOONCAKE) - 1 + rows])
        with pytest.raises(TraceError, match=f"line {rows + 1}: the gzip data is cut short here") as caught:
            read_trace(written(tmp_path, header), until_s=0)


def packed(text: str) -> bytes:
    """A gzip file that was cut short behind that text."""
    packer = zlib.compressobj(wbits=31)
    return packer.compress(text.encode()) + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("cut", [100_001, 300_003])
def test_a_window_before_a_cut_is_that_of_the_whole_file(tmp_path, cut):
    """As far as the rows before the cut go, and no further: a window that may have more rows behind it is an error."""
    whole = real_file("mooncake_conversation.csv.gz")
    path = written(tmp_path, whole.read_bytes()[:cut], "cut.csv.gz")
    with pytest.raises(
        TraceError, match=r"cut short here, [0-9.]+ s into the trace; .* window that ends before"
    ) as caught:
        read_trace(path)
    assert caught.value.line
    reached_s = float(str(caught.value).split("here, ")[1].split(" s ")[0])
    end_s = math.floor(reached_s)
    found = read_trace(path, until_s=end_s)
    assert found.window(0, end_s).requests == read_trace(whole).window(0, end_s).requests
    assert found.source == f"{path} (gzip data cut short at line {caught.value.line})"
    with pytest.raises(TraceError, match="cut short"):
        read_trace(path, until_s=end_s + 1)


def test_rows_before_a_cut_are_held_to_the_same_rules(tmp_path):
    """Times that go back are no trace, wherever it is cut; half a row isn't read; a row without tokens has a time."""
    sorted_rows = "0,5,5,\n2000,0,5,\n3000,5"
    found = read_trace(written(tmp_path, packed(MOONCAKE + sorted_rows)), until_s=2)
    assert [request.arrival_s for request in found.requests] == [0]
    assert dict(found.dropped) == {"zero_prompt_tokens": 1}
    with pytest.raises(TraceError, match=r"line 4: timestamp goes back from 2000 to 1000"):
        read_trace(written(tmp_path, packed(MOONCAKE + "0,5,5,\n2000,5,5,\n1000,5,5,\n9000,5,5,\n9")), until_s=1)
    json_rows = "".join(f'{{"timestamp": {at}, "input_length": 5, "output_length": 5}}\n' for at in (0, 1000, 2000))
    assert len(read_trace(written(tmp_path, packed(json_rows + '{"time')), until_s=2)) == 3


def test_damaged_gzip_is_an_error(tmp_path):
    """Bytes that changed inside a gzip file are found by its checksum or its structure."""
    data = bytearray(gzip.compress((MOONCAKE + "0,1,1,\n" * 500).encode()))
    data[-6] ^= 0xFF
    with pytest.raises(TraceError, match="damaged"):
        read_trace(written(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    ("name", "problem"), [(".", "folder"), ("none.csv", "no such file"), ("a\0b", "can't be read")]
)
def test_what_is_no_file_is_an_error(tmp_path, name, problem):
    """A folder, a missing file and an impossible name are errors of the whole path, without a line."""
    with pytest.raises(TraceError, match=problem) as caught:
        read_trace(f"{tmp_path}/{name}")
    assert caught.value.line is None


@given(trace=traces(), seconds=st.integers(1, 7))
def test_windows_side_by_side_lose_no_request(trace, seconds):
    """Windows that tile the trace hold every request once, with times inside the window."""
    tiles = [(start, trace.window(start, seconds)) for start in range(0, math.ceil(trace.span_s) + seconds, seconds)]
    assert all(0 <= one.arrival_s < seconds for _, tile in tiles for one in tile.requests)
    assert all(dict(tile.dropped) == dict(trace.dropped) for _, tile in tiles)
    back = [
        TraceRequest(one.index, round(start + one.arrival_s, 6), one.prompt_tokens, one.output_tokens, one.hash_ids)
        for start, tile in tiles
        for one in tile.requests
    ]
    assert tuple(back) == trace.requests


@given(trace=traces(), rate=st.floats(1e-3, 1e3))
def test_scaling_moves_times_only(trace, rate):
    """Scaling divides the times and keeps everything else, and scaling back restores the times."""
    faster = trace.scaled(rate)
    assert faster.span_s == pytest.approx(trace.span_s / rate)
    back = faster.scaled(1 / rate)
    for old, new in zip(trace.requests, back.requests, strict=True):
        assert new.arrival_s == pytest.approx(old.arrival_s)
        assert (new.index, new.prompt_tokens, new.output_tokens, new.hash_ids) == (
            old.index,
            old.prompt_tokens,
            old.output_tokens,
            old.hash_ids,
        )


@given(trace=traces(), limit=st.integers(1, 6000), n=st.integers(0, 50))
def test_limiting_and_first_account_for_every_request(trace, limit, n):
    """`limited` keeps what fits and counts the rest by name, once more on top; `first` keeps a prefix."""
    short = trace.limited(limit)
    assert all(one.prompt_tokens + one.output_tokens <= limit for one in short.requests)
    assert len(short) + short.dropped.get("over_max_tokens", 0) == len(trace)
    assert short.dropped["failed_request"] == 2
    assert sum(short.limited(1).dropped.values()) == len(trace) + 2
    assert trace.first(n).requests == trace.requests[:n]


def test_a_trace_says_what_was_done_to_it():
    """The source of a derived trace tells the window, the number and the scaling beside where it came from."""
    trace = Trace("here", "azure", [TraceRequest(0, 0.0, 1, 1), TraceRequest(1, 9.0, 1, 1)])
    assert (
        trace.window(0, 30).first(2).scaled(300).source
        == "here, from 0 s for 30 s, first 2 requests, arriving 300 times as fast"
    )
    assert trace.window(5, math.inf).source == "here, from 5 s on"
    assert trace.window(5, math.inf).requests == (TraceRequest(1, 4.0, 1, 1),)
    assert trace.span_s == 9
    assert trace.window(20, 5).span_s == 0


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda trace: trace.scaled(0), "rate of 0"),
        (lambda trace: trace.scaled(-2), "rate of -2"),
        (lambda trace: trace.scaled(math.nan), "rate of nan"),
        (lambda trace: trace.scaled(5e-324), "arrives at inf"),
        (lambda trace: trace.window(-1, 5), "starting at -1"),
        (lambda trace: trace.window(math.nan, 5), "starting at nan"),
        (lambda trace: trace.window(0, 0), "for 0 s"),
        (lambda trace: trace.window(0, math.nan), "for nan s"),
        (lambda trace: trace.first(-1), "first -1"),
        (lambda trace: trace.limited(0), "max_tokens is 0"),
        (lambda trace: trace.scaled("2"), "rate is '2'; it must be a number"),
        (lambda trace: trace.scaled(True), "rate is True"),
        (lambda trace: trace.scaled(10**400), "it is too large"),
        (lambda trace: trace.window(None, 5), "start_s is None"),
        (lambda trace: trace.window(0, [5]), "duration_s is"),
        (lambda trace: trace.first(1.5), r"the first 1\.5 requests"),
        (lambda trace: trace.limited("8"), "max_tokens is '8'"),
    ],
)
def test_impossible_arguments_are_refused(call, problem):
    """Arguments that no trace can have are errors that name the value."""
    with pytest.raises(ConfigError, match=problem):
        call(Trace("here", "azure", [TraceRequest(0, 1.0, 1, 1)]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"requests": 3}, "requests is 3"),
        ({"requests": ["one"]}, r"here holds 'one'; give TraceRequest\("),
        ({"requests": [TraceRequest(0, "1", 1, 1)]}, "with seconds and whole numbers of tokens"),
        ({"requests": [TraceRequest(0, 1.0, 1.5, 1)]}, "with seconds and whole numbers of tokens"),
        ({"requests": [TraceRequest(0, 1.0, 1, None)]}, "with seconds and whole numbers of tokens"),
        ({"requests": [TraceRequest(0, True, 1, 1)]}, "with seconds and whole numbers of tokens"),
        ({"requests": [], "dropped": ["failed_request"]}, "dropped is"),
    ],
)
def test_what_is_no_request_is_named(arguments, problem):
    """Text, missing numbers and parts of a token are ours to refuse, not Python's; other libraries' numbers do."""
    with pytest.raises(ConfigError, match=problem):
        Trace("here", "azure", **arguments)
    np = pytest.importorskip("numpy")
    of_numpy = TraceRequest(0, np.float32(1.5), np.int64(3), np.int32(1))
    assert Trace("here", "azure", [of_numpy]).scaled(np.float64(2)).requests[0].arrival_s == 0.75


@pytest.mark.parametrize(
    "requests",
    [
        [TraceRequest(0, 2.0, 1, 1), TraceRequest(1, 1.0, 1, 1)],
        [TraceRequest(0, -1.0, 1, 1)],
        [TraceRequest(0, math.nan, 1, 1)],
        [TraceRequest(0, 0.0, 0, 1)],
        [TraceRequest(0, 0.0, 1, 2**31)],
    ],
)
def test_a_trace_made_by_hand_is_checked(requests):
    """A trace can't be made with times out of order or token counts that no request has."""
    with pytest.raises(ConfigError, match=r"request \d of here"):
        Trace("here", "azure", requests)


ROW = AZURE + "2023-11-16 18:00:00.0,3,4\r\n"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current folder with nothing beside it, and no variable."""
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path


def test_default_trace_is_generated_where_there_is_no_file(elsewhere):
    """Without a folder of traces the default is the generator, and the source says so."""
    trace = default_trace()
    assert trace.format == "generated"
    assert len(trace) > 10_000
    assert trace.source.startswith("generated")
    assert TRACES_VARIABLE in trace.source


def test_default_trace_finds_the_shared_folder(elsewhere):
    """The file beside the current folder is used when the variable isn't set, or is empty."""
    (elsewhere / "shared" / "traces").mkdir(parents=True)
    written(elsewhere / "shared" / "traces", ROW, DEFAULT_FILE)
    trace = default_trace()
    assert len(trace) == 1
    assert trace.source.startswith(str(Path("..", "shared", "traces", DEFAULT_FILE)))


def test_the_default_path_is_what_the_default_trace_reads(elsewhere, monkeypatch):
    """None where requests are generated."""
    assert default_path() is None
    (elsewhere / "shared" / "traces").mkdir(parents=True)
    written(elsewhere / "shared" / "traces", ROW, DEFAULT_FILE)
    assert default_path().samefile(elsewhere / "shared" / "traces" / DEFAULT_FILE)
    monkeypatch.setenv(TRACES_VARIABLE, str(elsewhere / "shared" / "traces"))
    assert default_path() == elsewhere / "shared" / "traces" / DEFAULT_FILE


def test_default_trace_prefers_the_variable(elsewhere, monkeypatch):
    """The variable's folder wins over the shared one, and the source names it."""
    (elsewhere / "shared" / "traces").mkdir(parents=True)
    written(elsewhere / "shared" / "traces", ROW, DEFAULT_FILE)
    path = written(elsewhere / "here", ROW + "2023-11-16 18:00:00.0,3,4\r\n", DEFAULT_FILE)
    monkeypatch.setenv(TRACES_VARIABLE, str(path.parent))
    trace = default_trace()
    assert len(trace) == 2
    assert trace.source == f"{path} (by $KPOLICY_TRACES)"


@pytest.mark.parametrize(("name", "problem"), [("none", "isn't a folder"), ("here", f"has no {DEFAULT_FILE}")])
def test_a_wrong_variable_is_an_error(elsewhere, monkeypatch, name, problem):
    """A variable that names no folder, or one without the file, is never passed over in silence."""
    monkeypatch.setenv(TRACES_VARIABLE, str(elsewhere / name))
    with pytest.raises(TraceError, match=problem):
        default_trace()


def test_every_drop_reason_is_documented():
    """docs/traces.md explains each name that `dropped` can hold."""
    text = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    assert [name for name in DROP_REASONS if f"`{name}`" not in text] == []
