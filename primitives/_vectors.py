"""Vectors of numbers in registers, for loops that LLVM does not turn into good vector code itself.

LLVM gives a loop as many lanes as fit the widest numbers in it, so that bytes beside floats fill a
quarter of a register. Here a kernel says how many numbers it takes at a time:

    v = load(x, i, 32)                    # x[i], ..., x[i + 31]
    store(codes, i, cast(rint(v * lift), np.uint8))

+, -, *, / (of floats), &, |, ^, <<, >>, abs, min and max work lane by lane, also with a number for
all lanes. LLVM splits vectors into those that the machine has. Each lane is computed as a number
would be, so that the same bytes come out on every machine.
"""

import operator
from collections.abc import Callable
from importlib import import_module
from typing import Any

from relaxmpi.primitives._jit import extending

__all__ = [
    "cast",
    "counting",
    "highest",
    "load",
    "negative",
    "prefetch",
    "prefetch_room",
    "rint",
    "signs",
    "splat",
    "store",
    "zip_words",
]

# By name: numba and llvmlite are typed in part.
ir: Any = import_module("llvmlite.ir")
models: Any = import_module("numba.core.datamodel.models")
templates: Any = import_module("numba.core.typing.templates")
types: Any = import_module("numba.core.types")

Make = Callable[..., Any]
_INT32 = ir.IntType(32)


class Vector(types.Type):  # type: ignore[misc]
    """So many numbers of one type."""

    def __init__(self, number: Any, lanes: int) -> None:
        self.number, self.lanes = number, lanes
        super().__init__(f"Vector({number}, {lanes})")

    @property
    def floats(self) -> bool:
        """Whether they are floats."""
        return isinstance(self.number, types.Float)


@extending.register_model(Vector)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        number = manager.lookup(kind.number).get_value_type()
        super().__init__(manager, kind, ir.VectorType(number, kind.lanes))


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


def _spread(builder: Any, number: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, vector.count), [0] * vector.count)
    return builder.shuffle_vector(first, undefined, zeros)


@extending.intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def load(_: Any, array: Any, at: Any, lanes: Any) -> Any:
    """array[at], array[at + 1], ...; `lanes` is a literal."""
    result = Vector(array.dtype, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = context.get_value_type(result)
        where = builder.bitcast(_address(context, builder, signature, args), vector.as_pointer())
        return builder.load(where, align=1)

    return result(array, types.intp, lanes), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def store(_: Any, array: Any, at: Any, vector: Any) -> Any:
    """array[at], array[at + 1], ... = vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        where = _address(context, builder, signature, args)
        builder.store(args[2], builder.bitcast(where, args[2].type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def prefetch(_: Any, array: Any, at: Any) -> Any:
    """Begin to bring array[at], which need not exist, near."""
    return types.void(array, types.intp), _bring(0)


@extending.intrinsic  # type: ignore[untyped-decorator]
def prefetch_room(_: Any, array: Any, at: Any) -> Any:
    """The same where array[at] is going to be written to."""
    return types.void(array, types.intp), _bring(1)


def _bring(to_write: int) -> Make:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, _INT32, _INT32, _INT32])
        where = builder.bitcast(_address(context, builder, signature, args), byte)
        how = [ir.Constant(_INT32, k) for k in (to_write, 3, 1)]  # all levels, data
        builder.call(_function(builder, "llvm.prefetch.p0", kind), [where, *how])
        return context.get_dummy_value()

    return generate


@extending.intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def splat(_: Any, number: Any, lanes: Any) -> Any:
    """The same number in all lanes; `lanes` is a literal."""
    number = types.unliteral(number)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, args[0], context.get_value_type(signature.return_type))

    return Vector(number, lanes.literal_value)(number, lanes), generate


@extending.intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def counting(_: Any, number: Any, lanes: Any) -> Any:
    """0, 1, 2, ... as integers of a type; `lanes` is a literal."""
    result = Vector(number.dtype, lanes.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(result), list(range(result.lanes)))

    return result(number, lanes), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def cast(_: Any, vector: Any, number: Any) -> Any:
    """The same numbers as another type; floats lose their fractions, integers their upper bits."""
    source, target = vector.number, number.dtype
    floats = isinstance(source, types.Float), isinstance(target, types.Float)
    wider = target.bitwidth > source.bitwidth
    signed = isinstance(source, types.Integer) and source.signed
    how = {
        (True, True): "fpext" if wider else "fptrunc",
        (True, False): "fptosi",
        (False, True): "sitofp" if signed else "uitofp",
        (False, False): ("sext" if signed else "zext") if wider else "trunc",
    }[floats]

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if floats[0] == floats[1] and source.bitwidth == target.bitwidth:
            return args[0]
        return getattr(builder, how)(args[0], context.get_value_type(signature.return_type))

    return Vector(target, vector.lanes)(vector, number), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def signs(_: Any, vector: Any) -> Any:
    """Bytes: 255 where a float is not negative (-0 is not), 0 where it is or is NaN."""
    return _where(vector, ">=", types.uint8)


@extending.intrinsic  # type: ignore[untyped-decorator]
def negative(_: Any, vector: Any) -> Any:
    """Integers of the same width: -1 where a float is below 0, else 0."""
    return _where(vector, "<", types.Integer.from_bitwidth(vector.number.bitwidth, signed=True))


def _where(vector: Any, compare: str, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found = builder.fcmp_ordered(compare, args[0], ir.Constant(args[0].type, None))
        return builder.sext(found, context.get_value_type(signature.return_type))

    return Vector(number, vector.lanes)(vector), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def highest(_: Any, vector: Any) -> Any:
    """The largest of signed integers."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = args[0].type
        name = f"llvm.vector.reduce.smax.v{kind.count}i{kind.element.width}"
        return builder.call(_function(builder, name, ir.FunctionType(kind.element, [kind])), args)

    return vector.number(vector), generate


@extending.intrinsic  # type: ignore[untyped-decorator]
def rint(_: Any, vector: Any) -> Any:
    """The nearest integers, as floats; halves to even."""
    return vector(vector), _elementary("rint", vector)


@extending.intrinsic  # type: ignore[untyped-decorator]
def zip_words(_: Any, array: Any, at: Any, first: Any, second: Any) -> Any:
    """array[at], array[at + 1], ... = first[0], second[0], first[1], second[1], ..."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        n = signature.args[2].lanes
        order = [lane for i in range(n) for lane in (i, n + i)]
        mask = ir.Constant(ir.VectorType(_INT32, 2 * n), order)
        both = builder.shuffle_vector(args[2], args[3], mask)
        where = _address(context, builder, signature, args)
        builder.store(both, builder.bitcast(where, both.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, first, second), generate


def _function(builder: Any, name: str, kind: Any) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _elementary(name: str, vector: Vector) -> Make:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = args[0].type
        full = f"llvm.{name}.v{vector.lanes}f{vector.number.bitwidth}"
        return builder.call(_function(builder, full, ir.FunctionType(kind, [kind])), args)

    return generate


def _lanewise(symbol: Any, floats: str | None, integers: Make | None) -> None:
    """Let an operator work on two vectors of one type, or on a vector and a number."""

    @templates.infer_global(symbol)
    class Typing(templates.AbstractTemplate):  # type: ignore[misc]
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [kind for kind in args if isinstance(kind, Vector)]
            if kws or len(args) != 2 or not vectors:
                return None
            kind = vectors[0]
            if (floats if kind.floats else integers) is None:
                return None
            others = (kind if isinstance(arg, Vector) else kind.number for arg in args)
            return templates.signature(kind, *others)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = signature.return_type
        vector = context.get_value_type(kind)
        a, b = (x if x.type == vector else _spread(builder, x, vector) for x in args)
        if kind.floats and floats is not None and hasattr(builder, floats):
            return getattr(builder, floats)(a, b)
        assert integers is not None  # or typing would have refused it
        return integers(builder, kind, a, b)

    for pair in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        extending.lower_builtin(symbol, *pair)(lower)


def _plain(name: str) -> Make:
    return lambda builder, _kind, a, b: getattr(builder, name)(a, b)


def _extreme(compare: str) -> Make:
    def choose(builder: Any, kind: Vector, a: Any, b: Any) -> Any:
        if kind.floats:
            first = builder.fcmp_ordered(compare, a, b)
        elif kind.number.signed:
            first = builder.icmp_signed(compare, a, b)
        else:
            first = builder.icmp_unsigned(compare, a, b)
        return builder.select(first, a, b)

    return choose


def _right(builder: Any, kind: Vector, a: Any, b: Any) -> Any:
    return (builder.ashr if kind.number.signed else builder.lshr)(a, b)


for _symbol, _floats, _integers in (
    (operator.add, "fadd", _plain("add")),
    (operator.iadd, "fadd", _plain("add")),
    (operator.sub, "fsub", _plain("sub")),
    (operator.mul, "fmul", _plain("mul")),
    (operator.truediv, "fdiv", None),
    (operator.and_, None, _plain("and_")),
    (operator.or_, None, _plain("or_")),
    (operator.ior, None, _plain("or_")),
    (operator.xor, None, _plain("xor")),
    (operator.lshift, None, _plain("shl")),
    (operator.rshift, None, _right),
    (min, "", _extreme("<")),
    (max, "", _extreme(">")),
):
    _lanewise(_symbol, _floats, _integers)


@templates.infer_global(abs)
class _Magnitude(templates.AbstractTemplate):  # type: ignore[misc]
    def generic(self, args: Any, kws: Any) -> Any:
        if kws or len(args) != 1 or not isinstance(args[0], Vector) or not args[0].floats:
            return None
        return templates.signature(args[0], args[0])


@extending.lower_builtin(abs, Vector)  # type: ignore[untyped-decorator]
def _magnitude(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return _elementary("fabs", signature.return_type)(context, builder, signature, args)
