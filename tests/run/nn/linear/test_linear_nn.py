import torch

from meshwright.run.nn.linear.linear import Linear, attach_unused_parameter


def test_a_parameter_that_is_not_used_gets_noughts_and_changes_nothing() -> None:
    y, parameter = torch.randn(3, 4, requires_grad=True), torch.randn(2, requires_grad=True)
    same = attach_unused_parameter(y, parameter)
    slope = torch.randn(3, 4)
    found = torch.autograd.grad(same, (y, parameter), slope)
    assert torch.equal(same, y)
    assert torch.equal(found[0], slope)
    assert torch.equal(found[1], torch.zeros(2))


def test_a_linear_layer_that_leaves_its_bias_to_another_rank_brings_a_gradient_for_it() -> None:
    layer = Linear(4, 3, bias=True)
    assert layer.bias is not None
    layer.adds_bias = False
    with torch.no_grad():
        layer.weight.normal_()
        layer.bias.fill_(7.0)
    x = torch.randn(5, 4)
    y = layer(x)
    y.sum().backward()
    assert torch.allclose(y, x @ layer.weight.t(), atol=1e-6)
    assert layer.bias.grad is not None
    assert torch.equal(layer.bias.grad, torch.zeros(3))
