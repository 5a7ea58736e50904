"""The studio's server, asked as a browser asks it."""

import json
import re
import sys
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from penstock.schedules import names
from penstock.studio import answers
from penstock.studio.server import make_app
from penstock.studio.typed_inputs import DEFAULTS, Inputs


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(make_app(), base_url="http://127.0.0.1:8787") as client:
        yield client


def test_page_has_the_fields_and_all_schedules(client: TestClient) -> None:
    text = client.get("/").text
    start = json.loads(text.split('id="start">')[1].split("</script>")[0])
    assert names() == [schedule["name"] for schedule in start["schedules"]]
    assert DEFAULTS == start["fields"]


def test_page_asks_for_nothing_that_the_server_has_not(client: TestClient) -> None:
    text = client.get("/").text
    wanted = [part.split('"')[0] for mark in ('src="', 'href="') for part in text.split(mark)[1:]]
    asked = [address for address in wanted if not address.startswith("data:")]
    assert len(asked) >= 4
    assert [200] * len(asked) == [client.get(address).status_code for address in asked]


@pytest.mark.parametrize("path", ["/studio.js", "/form.js", "/table.js"])
def test_scripts_never_make_html_of_text(client: TestClient, path: str) -> None:
    script = client.get(path).text
    assert "make(" in script
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", script)


@pytest.mark.parametrize("path", ["/", "/picture", "/table", "/studio.js", "/page.css", "/nothing"])
def test_every_answer_forbids_requests_to_elsewhere(client: TestClient, path: str) -> None:
    headers = client.get(path).headers
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "no-store" == headers["cache-control"]


def test_picture_has_what_is_asked_for(client: TestClient) -> None:
    found = client.get("/picture", params={"schedule": "V-Min", "ranks": "2"}).json()
    assert ["V-Min", "1F1B"] == [panel["title"] for panel in found["page"]["panels"]]
    [csv, *_] = found["files"]
    assert "/files/v-min_p2_m8.csv?schedule=V-Min&ranks=2" == csv["href"]


@pytest.mark.parametrize("path", ["/picture", "/table", "/search", "/advice"])
def test_wrong_values_are_told_field_by_field(client: TestClient, path: str) -> None:
    answer = client.get(path, params={"ranks": "x", "delay": "-1"})
    # With another status, a browser would note an error in its console.
    assert (200, "application/problem+json") == (
        answer.status_code,
        answer.headers["content-type"],
    )
    assert {"ranks", "delay"} == {*answer.json()["problems"]}


@pytest.mark.parametrize("path", ["/picture", "/table", "/search", "/advice"])
def test_memory_in_which_nothing_fits_is_told(client: TestClient, path: str) -> None:
    problems = client.get(path, params={"memory": "0.1"}).json()["problems"]
    assert problems["memory"].startswith("Nothing fits: rank 0 may hold 0.1")


def test_file_of_wrong_values_is_refused_in_words(client: TestClient) -> None:
    answer = client.get("/files/a.csv", params={"ranks": "0"})
    expected = "ranks is '0'. Expected a whole number from 1 to 64."
    assert (422, expected) == (answer.status_code, answer.text)


def test_table_comes_line_by_line_with_the_bound_last(client: TestClient) -> None:
    lines = [json.loads(line) for line in client.get("/table").text.splitlines()]
    assert names() == [line["name"] for line in lines[:-1]]
    assert lines[-1]["bound"].startswith("No schedule is faster than 27 (linear)")


def test_searched_schedule_is_a_row_and_can_be_drawn_and_taken_away(client: TestClient) -> None:
    query = {"schedule": "searched", "beside": "", "memory": "3", "ranks": "2"}
    row = client.get("/search", params=query).json()
    panel = client.get("/picture", params=query).json()["page"]["panels"][0]
    assert ("searched", row["time"]) == (panel["title"], panel["timeline"]["makespan"])
    csv = client.get("/files/searched_p2_m8.csv", params=query).text
    assert 2 == len(csv.splitlines())


def test_files_are_downloaded_under_their_names(client: TestClient) -> None:
    found = client.get("/picture", params={"ranks": "2", "microbatches": "2"}).json()
    for file in found["files"]:
        answer = client.get(file["href"])
        name = file["href"].split("?")[0].removeprefix("/files/")
        assert (200, f'attachment; filename="{name}"') == (
            answer.status_code,
            answer.headers["content-disposition"],
        )


@pytest.mark.parametrize(
    "name",
    ["a.exe", ".csv", "日.csv", "a%0d%0ab.csv", "..%2f..%2fetc%2fpasswd"],
)
def test_no_other_files_are_there(client: TestClient, name: str) -> None:
    assert 404 == client.get(f"/files/{name}").status_code


def test_another_name_for_this_machine_is_refused(client: TestClient) -> None:
    # A page of elsewhere can make a name of its own lead to 127.0.0.1.
    assert 400 == client.get("/picture", headers={"host": "elsewhere.example"}).status_code
    assert 200 == client.get("/picture", headers={"host": "localhost:8787"}).status_code


@pytest.mark.parametrize(
    "path", ["/picture", "/table", "/search", "/advice", "/files/a.csv", "/page.js"]
)
def test_page_of_elsewhere_gets_no_answer(client: TestClient, path: str) -> None:
    # Such a page may not read the answer, but its images and scripts could start searches.
    for site, expected in (("cross-site", 403), ("same-site", 403), ("same-origin", 200)):
        query = {"ranks": "2", "microbatches": "2"}
        answer = client.get(path, params=query, headers={"sec-fetch-site": site})
        assert expected == answer.status_code


def test_link_of_elsewhere_may_lead_to_the_page(client: TestClient) -> None:
    assert 200 == client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code


def test_what_was_searched_is_kept_whatever_is_drawn(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = client.get("/search", params={"schedule": "ZB-V", "ranks": "2"}).json()
    monkeypatch.setattr(sys, "executable", "/bin/false")  # So that another search fails.
    assert first == client.get("/search", params={"schedule": "GPipe", "ranks": "2"}).json()
    assert "problems" in client.get("/search", params={"ranks": "3"}).json()


def test_search_that_is_killed_is_a_problem_of_its_field(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    problems = client.get("/search").json()["problems"]
    expected = (
        "The search ended with exit code 1, most likely because it ran out of memory. Choose fewer"
    )
    assert problems["search"].startswith(expected)


def test_only_questions_are_answered(client: TestClient) -> None:
    assert 405 == client.post("/picture").status_code


def test_mistake_of_ours_in_the_table_is_its_last_line(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(inputs: Inputs) -> Iterator[object]:
        yield {"name": "GPipe"}
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(answers, "table", fail)
    lines = [json.loads(line) for line in client.get("/table").text.splitlines()]
    expected = "The studio failed: ZeroDivisionError('of ours')"
    assert [{"name": "GPipe"}, {"problems": {"": expected}}] == lines
    assert "in fail" in capsys.readouterr().err


def test_mistake_of_ours_is_told_and_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(answers, "picture", fail)
    address = "http://127.0.0.1"
    with TestClient(make_app(), base_url=address, raise_server_exceptions=False) as client:
        answer = client.get("/picture")
    expected = "The studio failed: ZeroDivisionError('of ours')"
    assert (500, {"problems": {"": expected}}) == (answer.status_code, answer.json())
    assert "in fail" in capsys.readouterr().err
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_requests_with_the_origin_of_another_site_are_refused(client: TestClient) -> None:
    own = {"origin": "http://127.0.0.1:8787"}
    assert 200 == client.get("/table?ranks=2", headers=own).status_code
    for origin in ("http://example.org", "null", "http://127.0.0.1:9999"):
        answer = client.get("/table?ranks=2", headers={"origin": origin})
        assert 403 == answer.status_code
