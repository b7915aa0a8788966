"""Small HTTP pages: who may ask for them, and a server that idle clients cannot exhaust.

allowed_hosts     names in the Host header that are answered
metrics_page      metrics of prometheus-client as such a page
page_server       a bounded server of pages that are made when somebody asks
"""
