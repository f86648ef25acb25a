"""What `attach` refuses, by name and on all ranks."""

import pytest
from loops import SMALL, loss_of, nn, perceptron, sgd_of, torch

import relaxmpi as rx


@pytest.mark.ranks(2)
@pytest.mark.parametrize("which", ["shape", "name", "optimizer", "state", "algorithm", "buckets"])
def test_ranks_with_different_models_all_learn_it(comm, which):
    odd = comm.rank == 1
    model = perceptron(width=33 if odd and which == "shape" else 32)
    if which == "name" and odd:
        model = nn.Sequential(*list(model))
        model.add_module("0b", model[0])
        del model[0]
    optimizer = sgd_of(model)
    if which == "optimizer" and odd:
        optimizer = torch.optim.AdamW(model.parameters())
    if which == "state" and odd:
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    algorithm = rx.QSGD(bits=4 if odd and which == "algorithm" else 8)
    size = 2000 if odd and which == "buckets" else 1000
    with pytest.raises(rx.MismatchError, match="disagree"):
        rx.attach(model, optimizer, algorithm, comm=comm, bucket_bytes=size)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert rx.allreduce(comm, 1) == 2, "the Comm stays usable"


@pytest.mark.ranks(1, 2)
def test_a_model_without_trainable_parameters_is_refused_everywhere(comm):
    model = nn.Linear(2, 2)
    optimizer = sgd_of(model)
    if comm.rank == comm.size - 1:
        for p in model.parameters():
            p.requires_grad_(False)
    error = rx.MismatchError if comm.size > 1 else ValueError
    with pytest.raises(error, match="no trainable parameter"):
        rx.attach(model, optimizer, rx.SGD(), comm=comm)
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        rx.attach(model, optimizer, rx.SGD(), comm=comm)


@pytest.mark.ranks(1, 2)
def test_wrong_arguments_are_refused(comm):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="2 parameters that are not the model's"):
        rx.attach(model, sgd_of(nn.ModuleList([model, other])), rx.SGD(), comm=comm)
    with pytest.raises(ValueError, match=r"momentum=0\.9 has no effect here"):
        rx.attach(model, sgd_of(model), rx.SGD(momentum=0.9), comm=comm)
    with pytest.raises(TypeError, match="algorithm must be one such as"):
        rx.attach(model, sgd_of(model), "sgd", comm=comm)
    with pytest.raises(TypeError, match=r"did you mean OSGP\(\)\?"):
        rx.attach(model, sgd_of(model), rx.OSGP, comm=comm)
    for spec in (rx.OSGP(rule=rx.SGD), rx.QSGD(rule=rx.SGD)):
        with pytest.raises(TypeError, match=r"did you mean SGD\(\)\?"):
            spec.bind(comm, torch.zeros(3), lr=0.1)
    with pytest.raises(ValueError, match="at least one byte"):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm, bucket_bytes=0)
    with pytest.raises(TypeError, match=r"nonfinite must be NonFinite\.PASS"):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm, nonfinite="skip")


@pytest.mark.ranks(2)
def test_attaching_twice_is_refused(comm):
    model = nn.Linear(2, 2)
    with (
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm),
        pytest.raises(ValueError, match="attached already"),
    ):
        rx.attach(model, sgd_of(model), rx.SGD(), comm=comm)


@pytest.mark.ranks(1, 2)
def test_a_replaced_parameter_is_named(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    sync = rx.attach(model, optimizer, rx.SGD(), comm=comm, **SMALL)
    model[2].weight = nn.Parameter(torch.zeros(32, 32))
    loss_of(model).backward()
    with pytest.raises(rx.RelaxError, match=r"2\.weight was replaced"):
        optimizer.step()
    sync.detach()


@pytest.mark.ranks(2)
def test_new_parameters_in_the_optimizer_are_noticed(comm):
    model = perceptron()
    optimizer = sgd_of(model)
    with rx.attach(model, optimizer, rx.SGD(), comm=comm):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        loss_of(model).backward()
        with pytest.raises(rx.RelaxError, match="got or lost parameters"):
            optimizer.step()


@pytest.mark.ranks(1)
def test_an_optimizer_that_calls_backward_itself_is_refused(comm):
    model = perceptron()
    optimizer = torch.optim.LBFGS(model.parameters())
    with (
        rx.attach(model, optimizer, rx.SGD(), comm=comm),
        pytest.raises(rx.RelaxError, match="closure"),
    ):
        optimizer.step(lambda: loss_of(model))


@pytest.mark.ranks(1, 2)
def test_another_optimizer_on_attached_parameters_is_refused(comm):
    model = torch.nn.Linear(2, 1)
    sync = rx.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), rx.SGD(), comm=comm)
    other = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(rx.RelaxError, match="Adam that is not attached"):
        other.step()
    torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1).step()
    sync.detach()
    other.step()


@pytest.mark.ranks(1, 2)
def test_buffers_that_cannot_be_sent_are_named(comm):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, buffer in [("wide", torch.ones(1).expand(3)), ("thin", torch.eye(2).to_sparse())]:
        model.register_buffer(name, buffer)
        with pytest.raises(ValueError, match=name):
            rx.attach(model, optimizer, rx.SGD(), comm=comm)
        del model._buffers[name]
    with pytest.raises(TypeError, match="a Module and an Optimizer"):
        rx.attach(optimizer, model, rx.SGD(), comm=comm)
