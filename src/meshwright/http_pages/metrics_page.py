"""`make_metrics_page`: the metrics of a registry of prometheus-client as a page."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from meshwright.http_pages.page_server import Page, PageRequest

_PATHS = ("/", "/metrics")


def make_metrics_page(
    choose_encoder: Callable[[str], tuple[Callable[[Any], bytes], str]], registry: Any
) -> Callable[[PageRequest], Page]:
    """Return what answers a scrape, in the format that the client's own `choose_encoder` takes."""

    def answer(request: PageRequest) -> Page:
        if request.path not in _PATHS:
            return Page(b"there is /metrics\n", status=HTTPStatus.NOT_FOUND)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return Page(encode(registry), content_type)

    return answer
