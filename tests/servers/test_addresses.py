"""Addresses of several servers, as lists and ranges."""

import pytest

from mt_grpo.errors import ConfigError
from mt_grpo.servers import expand_addresses, host_url


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


NONE = "is no address of a server"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("node1:8000", f"`urls: node1:8000` {NONE}"),
        *((given, NONE) for given in ("http://:80", "http://a:port", "http://node[a-b]:1", "http://n1:8000:8000")),
        *((given, NONE) for given in ("http://n1:70000", "http://n1:0", "http://n 1:8000")),
        (f"http://node[1-{'9' * 5000}]:1", NONE),
        ("http://node[3-1]:1", "runs from 3 to 1: write the smaller number first"),
        ("http://node[1-999999999999]:1", "names more than 1024 servers"),
        (["http://a:1", "http://a:1/"], "names http://a:1 twice: leave one"),
        ("http://localhost:1,http://127.0.0.1:1", "names http://127.0.0.1:1 twice, also as http://localhost:1"),
        *((f"{one},{other}", "twice") for one, other in [("http://a", "http://A:80"), ("http://n[1-2]", "http://n2")]),
        *((given, "twice") for given in ("http://0.0.0.0:1,http://[::1]:1", "http://n1.,http://n1")),
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
        *((host, "http://[fd00::1]:8000") for host in ("fd00::1", "[fd00::1]")),
        *((host, "http://127.0.0.1:8000") for host in ("0.0.0.0", "::")),
        *((host, None) for host in ("node1:8000", "127.0.0.1:8000", "http://node1", "http://node1:8000")),
        *((host, None) for host in ("a/b", "a b", "")),
    ],
)
def test_host_and_port_make_an_address(host, url):
    if url is not None:
        assert host_url(host, 8000) == url
        return
    with pytest.raises(ConfigError, match="is no host: give its name or number alone.* the port by itself") as caught:
        host_url(host, 8000)
    assert "\n" not in str(caught.value)
