"""An alias is its source in everything but ownership and autograd history."""

import pytest
import torch
from helpers import geometry

import weakref_ext

DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)} - {torch.quint8, torch.qint8}, key=str)
DTYPES = [d for d in DTYPES if not str(d).startswith(("torch.q", "torch.bits"))]

VIEWS = {
    "contiguous": lambda: torch.randn(4, 6),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 4096),
    "transposed": lambda: torch.randn(4, 6).t(),
    "strided slice": lambda: torch.randn(8, 6)[1::2, ::3],
    "expanded": lambda: torch.randn(1, 6).expand(5, 6),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "as_strided": lambda: torch.randn(4096).as_strided((2, 1, 8, 64), (1536, 0, 192, 1), 128),
    "overlapping": lambda: torch.arange(10.0).as_strided((4, 4), (1, 2)),
    "empty view": lambda: torch.randn(100)[3:3],
    "seven dimensions": lambda: torch.randn(1, 2, 1, 2, 1, 2, 2).permute(6, 5, 4, 3, 2, 1, 0),
    "conj": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "conj transposed": lambda: torch.randn(3, 4, dtype=torch.complex64).mH,
    "meta": lambda: torch.empty(3, 4, device="meta").t(),
    "numpy": lambda: torch.from_numpy(torch.arange(12).numpy()).view(3, 4)[1:],
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_geometry_is_the_source_s(make, weaken):
    source = make()
    alias = weaken([source])[0]
    assert geometry(alias) == geometry(source)
    assert alias.is_contiguous() == source.is_contiguous()
    for fmt in (torch.channels_last, torch.channels_last_3d):
        if source.dim() == (4 if fmt is torch.channels_last else 5):
            assert alias.is_contiguous(memory_format=fmt) == source.is_contiguous(memory_format=fmt)
    if source.device.type != "meta":
        assert torch.equal(alias, source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, weaken):
    source = torch.arange(64, dtype=torch.uint8).view(dtype)[1:]
    alias = weaken(source)
    assert geometry(alias) == geometry(source)
    assert torch.equal(alias.contiguous().view(torch.uint8), source.contiguous().view(torch.uint8))


def test_writes_are_seen_both_ways(weaken):
    source = torch.zeros(4, 4)
    alias = weaken((source[:, 1:],))[0]
    alias.fill_(2)
    assert source.sum() == 24
    source.fill_(5)
    assert alias.sum() == 60


def test_no_autograd_history_whatever_the_source(weaken):
    leaf = torch.nn.Parameter(torch.randn(3))
    with torch.enable_grad():
        weak = weaken([leaf, leaf * 2, leaf.exp()])
    assert [type(x) for x in weak] == [torch.Tensor] * 3
    assert [(x.requires_grad, x.grad_fn, x.is_leaf) for x in weak] == [(False, None, True)] * 3


def test_inference_mode_gives_inference_tensors(weaken):
    source = torch.randn(2)
    with torch.inference_mode():
        made_inside = torch.randn(2)
        assert weaken(source).is_inference()
        assert weaken(made_inside).is_inference()
    alias = weaken(made_inside)
    assert not alias.is_inference()
    (alias * alias).sum()


def test_the_storage_cannot_be_resized(weaken):
    alias = weaken(torch.randn(4))
    with pytest.raises(RuntimeError, match="not resizable"):
        alias.resize_(100)
    with pytest.raises(RuntimeError, match="not resizable"):
        alias.untyped_storage().resize_(100)


def test_the_type_is_the_one_that_detach_gives(weaken):
    class Tagged(torch.Tensor):
        pass

    class Weight(torch.nn.Parameter):
        pass

    sources = [torch.randn(3).as_subclass(Tagged), torch.nn.Parameter(torch.randn(3)), Weight(torch.randn(3))]
    weak = [weaken([source])[0] for source in sources]
    assert [type(w) for w in weak] == [type(s.detach()) for s in sources] == [Tagged, torch.Tensor, torch.Tensor]
    assert all(weakref_ext.is_weak_ref(w) for w in weak)


def test_copy_on_write_sources_own_their_bytes_first(weaken):
    original = torch.zeros(8)
    lazy = torch._lazy_clone(original)
    alias = weaken(lazy)
    lazy.fill_(1)
    assert alias.sum() == 8
    assert original.sum() == 0
    assert alias.data_ptr() == lazy.data_ptr()


def test_aliases_of_aliases_ask_the_root_owner(weaken):
    source = torch.randn(4)
    second = weaken(weaken(source)[1:])
    assert weakref_ext.is_weak_ref(second)
    assert weakref_ext.owner_alive(second)
    del source
    assert not weakref_ext.owner_alive(second)


def test_provenance_of_views_and_strangers():
    source = torch.randn(4, 4)
    alias = weakref_ext.weak_ref_tensors(source)
    assert weakref_ext.is_weak_ref(alias.t()[1:])
    assert not weakref_ext.is_weak_ref(source)
    assert not weakref_ext.is_weak_ref(alias.clone())
    assert not weakref_ext.is_weak_ref(torch.frombuffer(bytearray(4), dtype=torch.uint8))
    assert not weakref_ext.is_weak_ref(torch.eye(2).to_sparse())
    assert weakref_ext.owner_alive(source)


def test_an_owner_that_gave_its_memory_back_is_not_alive():
    source = torch.randn(4)
    alias = weakref_ext.weak_ref_tensors(source)
    source.untyped_storage().resize_(0)
    assert not weakref_ext.owner_alive(alias)


@pytest.mark.parametrize("query", [weakref_ext.is_weak_ref, weakref_ext.owner_alive])
def test_provenance_wants_a_tensor(query):
    with pytest.raises(TypeError, match=r"expected a torch.Tensor, got <class 'list'>"):
        query([])
