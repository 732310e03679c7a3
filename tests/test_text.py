"""Numbers and tables for people."""

from __future__ import annotations

import pytest

from raywl.text import format_bytes, format_rate, format_seconds, plain_table


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (90856960, "86.6 MiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_bytes(num_bytes, shown):
    assert format_bytes(num_bytes) == shown


def test_rates_and_seconds():
    assert format_rate(3 << 20, 2.0) == "1.5 MiB/s"
    assert format_rate(3 << 20, 0.0) == "-"
    assert format_seconds(0.0123) == "12.3 ms"
    assert format_seconds(2) == "2.00 s"


def test_columns_of_numbers_end_together_and_others_start_together():
    text = plain_table(
        ["file", "size", "rate"], [["1. long name", "9.5 MiB", "-"], ["b", "10.0 MiB", "1 B/s"]]
    )
    assert text.splitlines() == [
        "file              size   rate",
        "------------  --------  -----",
        "1. long name   9.5 MiB      -",
        "b             10.0 MiB  1 B/s",
    ]


def test_a_table_without_rows_has_its_headers():
    assert plain_table(["a", "bc"], []) == "a  bc\n-  --"
