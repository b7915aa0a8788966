"""Small HTTP pages: who may ask for them, and a server that idle clients cannot exhaust.

allowed_hosts     names in the Host header that are answered
metrics_page      metrics of prometheus-client as such a page
page_server       a bounded server of pages that are made when somebody asks
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.http_pages.allowed_hosts import AllowedHosts, parse_allowed_hosts
    from meshwright.http_pages.page_server import Page, PageRequest, PageServer

_EXPORTS = {
    "AllowedHosts": "meshwright.http_pages.allowed_hosts",
    "Page": "meshwright.http_pages.page_server",
    "PageRequest": "meshwright.http_pages.page_server",
    "PageServer": "meshwright.http_pages.page_server",
    "parse_allowed_hosts": "meshwright.http_pages.allowed_hosts",
}

__all__ = ["AllowedHosts", "Page", "PageRequest", "PageServer", "parse_allowed_hosts"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _EXPORTS)
