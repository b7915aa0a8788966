"""All families of the bench, in the order in which they are measured."""

from meshwright.observe.bench.attention import ATTENTION
from meshwright.observe.bench.family import Family
from meshwright.observe.bench.products import PRODUCTS

FAMILIES: tuple[Family, ...] = (PRODUCTS, ATTENTION)
