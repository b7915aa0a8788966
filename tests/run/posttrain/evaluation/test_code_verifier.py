"""Programs that are right pass tests of every usual kind, though these run in another process."""

import sys
from collections.abc import Iterator

import pytest

from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.verifiers import VerifierJob, VerifierLimits, VerifierPool

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")

CODE = "meshwright.run.posttrain.evaluation.verifiers.code_verifier:passes_tests"

CASES = {
    "a candidate of HumanEval": (
        """\
from typing import List
def has_close(numbers: List[float], t: float) -> bool:
    return any(abs(a-b)<t for i,a in enumerate(numbers) for b in numbers[i+1:])
""",
        """\
METADATA={}
def check(candidate):
    assert candidate([1.0,2.0,3.9,4.0,5.0,2.2],0.3)==True
    assert candidate([1.0,2.0],0.5)==False
check(has_close)
""",
    ),
    "a function with a built-in's name": (
        """\
def sum(a,b):
    return a+b
""",
        """\
assert sum(10,15)==25
assert sum(18,12)==30
""",
    ),
    "tuple": (
        """\
def f(x): return (x,[x],{x:1},{x},frozenset([x]))
""",
        """\
assert f(2)==(2,[2],{2:1},{2},frozenset([2]))
""",
    ),
    "class": (
        """\
class Stack:
    def __init__(s): s.a=[]
    def push(s,x): s.a.append(x)
    def pop(s): return s.a.pop()
    def __len__(s): return len(s.a)
""",
        """\
s=Stack()
s.push(3)
s.push(4)
assert len(s)==2
assert s.pop()==4
assert s.a==[3]
""",
    ),
    "a method of a solution": (
        """\
class Solution:
    def twoSum(self, nums, target):
        d={}
        for i,n in enumerate(nums):
            if target-n in d: return [d[target-n],i]
            d[n]=i
""",
        """\
assert Solution().twoSum([2,7,11,15],9)==[0,1]
""",
    ),
    "a tree": (
        """\
class TreeNode:
    def __init__(s,v,l=None,r=None): s.val,s.left,s.right=v,l,r
def depth(t): return 0 if t is None else 1+max(depth(t.left),depth(t.right))
""",
        """\
t=TreeNode(1,TreeNode(2),TreeNode(3,TreeNode(4)))
assert depth(t)==3
assert t.right.left.val==4
assert t.left.left is None
""",
    ),
    "arguments changed in place": (
        """\
def rot(m):
    m[:]=[list(r) for r in zip(*m[::-1])]
def srt(a): a.sort()
""",
        """\
m=[[1,2],[3,4]]
rot(m)
assert m==[[3,1],[4,2]]
a=[3,1,2]
srt(a)
assert a==[1,2,3]
""",
    ),
    "callback": (
        """\
def ap(f,xs): return [f(x) for x in xs]
""",
        """\
assert ap(lambda x:x+1,[1,2])==[2,3]
assert ap(str,[1])==['1']
assert ap(len,['ab'])==[2]
""",
    ),
    "raises": (
        """\
class MyErr(ValueError): pass
def f(x):
    if x<0: raise MyErr('neg')
    if x==0: raise ZeroDivisionError('zero')
    return x
""",
        """\
try:
    f(-1)
    assert False
except MyErr as e:
    assert str(e)=='neg'
try:
    f(-1)
except ValueError: pass
else: assert False
try:
    f(0)
    assert False
except ZeroDivisionError: pass
""",
    ),
    "generators": (
        """\
def g(n):
    for i in range(n): yield i*i
""",
        """\
assert list(g(4))==[0,1,4,9]
assert sum(g(3))==5
assert next(g(2))==0
""",
    ),
    "collections": (
        """\
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
def c(s): return Counter(s)
def d():
    x=defaultdict(list); x[1].append(2); return x
P=namedtuple('P','x y')
def p(): return P(1,2)
def q(): return deque([1,2])
""",
        """\
from collections import Counter, deque
assert c('aab')==Counter('aab')
assert c('aab')=={'a':2,'b':1}
assert d()=={1:[2]}
assert p()==(1,2)
assert p().x==1
assert q()==deque([1,2])
""",
    ),
    "near and special floats": (
        """\
import math
def f(x): return math.sqrt(x)
def inf(): return float('inf')
def nan(): return float('nan')
""",
        """\
assert abs(f(2)-1.41421356)<1e-6
assert math.isclose(f(4),2)
assert inf()==float('inf')
assert nan()!=nan()
""",
    ),
    "bigint": (
        """\
def f(n):
    r=1
    for i in range(1,n+1): r*=i
    return r
""",
        """\
import math
assert f(1000)==math.factorial(1000)
""",
    ),
    "replaced stdout": (
        """\
def f(): print('hello')
""",
        """\
import io,sys
o=io.StringIO()
s=sys.stdout
sys.stdout=o
f()
sys.stdout=s
assert o.getvalue()=='hello\\n'
""",
    ),
    "redirected stdout": (
        """\
def f(): print('hello')
""",
        """\
import io,contextlib
o=io.StringIO()
with contextlib.redirect_stdout(o): f()
assert 'hello' in o.getvalue()
""",
    ),
    "unittest": (
        """\
def f(x): return x*2
""",
        """\
import unittest
class T(unittest.TestCase):
    def test_a(self):
        self.assertEqual(f(2),4)
    def test_b(self):
        with self.assertRaises(TypeError): f(None)
r=unittest.TextTestRunner(stream=__import__('io').StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(T))
assert r.wasSuccessful()
""",
    ),
    "isinstance": (
        """\
class A: pass
class B(A): pass
def mk(): return B()
""",
        """\
assert isinstance(mk(),A)
assert isinstance(mk(),B)
assert issubclass(B,A)
""",
    ),
    "operators of a class": (
        """\
class V:
    def __init__(s,x): s.x=x
    def __add__(s,o): return V(s.x+o.x)
    def __mul__(s,k): return V(s.x*k)
    def __eq__(s,o): return s.x==o.x
    def __str__(s): return f'V({s.x})'
    def __lt__(s,o): return s.x<o.x
""",
        """\
assert V(1)+V(2)==V(3)
assert V(2)*3==V(6)
assert str(V(2))=='V(2)'
assert V(1)<V(2)
assert sorted([V(3),V(1)])[0]==V(1)
""",
    ),
    "keywords and defaults": (
        """\
def f(a,*args,b=2,**k): return (a,args,b,k)
""",
        """\
assert f(1,2,3,b=4,c=5)==(1,(2,3),4,{'c':5})
""",
    ),
    "constants": (
        """\
N=5
TABLE={'a':[1]}
def f(): return N
""",
        """\
assert N==5 and TABLE['a']==[1] and f()==5
""",
    ),
    "closures": (
        """\
def adder(n):
    def add(x): return x+n
    return add
""",
        """\
assert adder(3)(4)==7
assert callable(adder(1))
""",
    ),
    "enum": (
        """\
from enum import Enum, IntEnum
class C(Enum):
    R=1
class I(IntEnum):
    A=2
def f(): return C.R
""",
        """\
assert C.R==f()
assert f() is C.R
assert C.R.value==1
assert I.A==2
assert C(1)==C.R
""",
    ),
    "dataclass": (
        """\
from dataclasses import dataclass
@dataclass
class P:
    x:int
    y:int=0
""",
        """\
assert P(1)==P(1,0)
assert P(1).x==1
assert repr(P(1))=='P(x=1, y=0)'
""",
    ),
    "asyncio in the program": (
        """\
import asyncio
async def f(x):
    await asyncio.sleep(0)
    return x*2
def run(x): return asyncio.run(f(x))
""",
        """\
assert run(3)==6
""",
    ),
    "a coroutine": (
        """\
async def f(x): return x*2
""",
        """\
import asyncio
assert asyncio.run(f(3))==6
""",
    ),
    "decimals, fractions and dates": (
        """\
import re,json,random,string,itertools,functools,heapq,bisect,datetime,decimal,fractions
def f():
    return [json.dumps({'a':1}), decimal.Decimal('1.5'), fractions.Fraction(1,3),
            datetime.date(2020,1,2), 1+2j, b'x', range(3)]
""",
        """\
import decimal,fractions,datetime
assert f()==['{"a": 1}', decimal.Decimal('1.5'), fractions.Fraction(1,3),
             datetime.date(2020,1,2), 1+2j, b'x', range(3)]
""",
    ),
    "numbers of NumPy": (
        """\
import numpy as np
def f(): return np.arange(3)
def g(): return np.float64(1.5)
def h(): return f().tolist()
""",
        """\
assert g()==1.5
assert h()==[0,1,2]
""",
    ),
    "arrays of NumPy": (
        """\
import numpy as np
def f(): return np.arange(3)
""",
        """\
import numpy as np
assert np.array_equal(f(), np.array([0,1,2]))
assert (f()==[0,1,2]).all()
""",
    ),
    "arrays as arguments": (
        """\
import numpy as np
def f(a): return float(a.sum())
""",
        """\
import numpy as np
assert f(np.array([1.,2.]))==3.0
""",
    ),
    "a linked list": (
        """\
class N:
    def __init__(s,v,n=None): s.v,s.next=v,n
def rev(h):
    p=None
    while h: h.next,p,h=p,h,h.next
    return p
""",
        """\
h=N(1,N(2,N(3)))
r=rev(h)
v=[]
while r:
    v.append(r.v)
    r=r.next
assert v==[3,2,1]
""",
    ),
    "attributes that tests set": (
        """\
class A:
    x=1
a=A()
def get(): return a.x
""",
        """\
a.x=5
assert get()==5
""",
    ),
    "iterators as arguments": (
        """\
def f(it): return sum(it)
""",
        """\
assert f(iter([1,2,3]))==6
assert f(x for x in range(4))==6
assert f(range(4))==6
assert f({1:2}.keys())==1
""",
    ),
    "files": (
        """\
def f():
    open('x.txt','w').write('hi')
    return open('x.txt').read()
""",
        """\
assert f()=='hi'
""",
    ),
    "recursion": (
        """\
import sys
sys.setrecursionlimit(10000)
def f(n): return 0 if n==0 else 1+f(n-1)
""",
        """\
assert f(5000)==5000
""",
    ),
    "standard input": (
        """\
def f():
    return int(input())*2
""",
        """\
import io,sys
sys.stdin=io.StringIO('4\\n')
assert f()==8
""",
    ),
    "names and docstrings": (
        """\
def f():
    'doc'
    return 1
""",
        """\
assert f.__doc__=='doc'
assert f.__name__=='f'
""",
    ),
    "None and True": (
        """\
def f(x): return None if x else True
""",
        """\
assert f(1) is None
assert f(0) is True
""",
    ),
}
"""A program, and its tests."""


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool([CODE], workers=1, limits=VerifierLimits(deadline_s=60)) as made:
        yield made


def judge(pool: VerifierPool, program: str, tests: str) -> RewardComponent:
    payload = {"program": program, "tests": tests}
    (part,) = pool.verify([VerifierJob(name="t", verifier=CODE, payload=payload, is_final=True)])
    return part


@pytest.mark.parametrize("kind", CASES)
def test_a_right_program_passes(pool: VerifierPool, kind: str) -> None:
    part = judge(pool, *CASES[kind])
    assert (part.value, part.reason) == (1.0, "passed")


@pytest.mark.parametrize("kind", CASES)
def test_tests_that_want_something_else_fail(pool: VerifierPool, kind: str) -> None:
    program, tests = CASES[kind]
    assert judge(pool, program, f"{tests}assert False").value == 0.0
    part = judge(pool, "", tests)
    assert part.value == 0.0
    assert "tests line" in part.reason


def test_what_cannot_be_given_to_a_program_is_named(pool: VerifierPool) -> None:
    tests = "class O:\n    v = 3\nassert f(O()) == 3"
    part = judge(pool, "def f(o): return o.v", tests)
    assert part.reason == "tests line 3: TypeError: a O of the tests cannot be given to the program"
