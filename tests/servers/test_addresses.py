"""Addresses of several servers, as lists and ranges."""

from __future__ import annotations

import pytest

from mt_grpo.errors import ConfigError
from mt_grpo.servers.addresses import expand_addresses, host_url


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("http://a:1/, http://b:2", ["http://a:1", "http://b:2"]),
        (["http://a:1", "http://b:2,http://c"], ["http://a:1", "http://b:2", "http://c"]),
        ("http://node[1-3]:8000", [f"http://node{number}:8000" for number in (1, 2, 3)]),
        ("http://node[08-10,12]:80", [f"http://node{number}:80" for number in ("08", "09", "10", "12")]),
        ("http://a:[8000-8001],http://b:1", ["http://a:8000", "http://a:8001", "http://b:1"]),
        ("http://r[1-2]n[1-2]", ["http://r1n1", "http://r1n2", "http://r2n1", "http://r2n2"]),
        ("http://[::1]:8000", ["http://[::1]:8000"]),
        ("https://host/prefix/", ["https://host/prefix"]),
        ("", []),
    ],
)
def test_lists_and_ranges_name_each_server(given, urls):
    assert expand_addresses(given, "urls") == urls


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("node1:8000", "`urls: node1:8000` is no address of a server"),
        ("http://:80", "is no address of a server"),
        ("http://a:port", "is no address of a server"),
        ("http://node[a-b]:1", "is no address of a server"),
        ("http://node[3-1]:1", "runs from 3 to 1: write the smaller number first"),
        ("http://node[1-999999999999]:1", "names more than 1024 servers"),
        (["http://a:1", "http://a:1/"], "names http://a:1 twice: leave one"),
        ("http://localhost:1,http://127.0.0.1:1", "names http://127.0.0.1:1 twice, also as http://localhost:1"),
        ("http://a,http://A:80", "twice"),
        ("http://n[1-2],http://n2", "twice"),
        ("http://0.0.0.0:1,http://[::1]:1", "twice"),
        ("http://n1.,http://n1", "twice"),
        ("http://n1:8000:8000", "is no address of a server"),
        ("http://n1:70000", "is no address of a server"),
    ],
)
def test_a_wrong_address_is_told_by_one_sentence(given, words):
    with pytest.raises(ConfigError) as caught:
        expand_addresses(given, "urls")
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("node1", "http://node1:8000"),
        ("10.0.0.2", "http://10.0.0.2:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("[fd00::1]", "http://[fd00::1]:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
    ],
)
def test_host_and_port_make_an_address(host, url):
    assert host_url(host, 8000, "vllm_server_host") == url


@pytest.mark.parametrize(
    "host", ["node1:8000", "127.0.0.1:8000", "http://node1", "http://node1:8000", "a/b", "a b", ""]
)
def test_a_host_with_more_in_it_is_refused(host):
    with pytest.raises(ConfigError, match="is no host: give its name or number alone.* the port by itself") as caught:
        host_url(host, 8000, "vllm_server_host")
    assert "\n" not in str(caught.value)
