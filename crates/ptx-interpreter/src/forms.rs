//! The form of each instruction: its modifiers, the types that it has and its operands, after NVIDIA's manual of the PTX ISA.
//! A modifier that a form does not consume is an error, so that nothing is guessed.

mod collective;
mod memory;

use self::collective::fence;
use self::memory::strip_hints;

use super::arithmetic::{
    self, ApproximateFunction, LaneFunction, PtxComparison, RoundedOperation, Rounding, approximate, compares,
    conversion, elementwise, mask, round_once, whole, wrapped,
};
use super::decode::{DecodeResult, Decoder, InstructionForm, constant};
use super::instruction::{DecodedInstruction, InitialValue, PtxOperation, StateSpace};
use super::parse::{InstructionText, OperandText};
use super::types::{FloatFormat, PREDICATE, PtxType};

const ROUNDINGS: [(&str, Rounding); 4] =
    [("rn", Rounding::Nearest), ("rz", Rounding::Zero), ("rm", Rounding::Down), ("rp", Rounding::Up)];
const INTEGRAL: [(&str, Rounding); 4] =
    [("rni", Rounding::Nearest), ("rzi", Rounding::Zero), ("rmi", Rounding::Down), ("rpi", Rounding::Up)];

/// The scopes of fences and atomic operations, and whether each reaches beyond the CTA.
const SCOPES: [(&str, bool); 4] = [("cta", false), ("cluster", true), ("gpu", true), ("sys", true)];

const U32: PtxType = PtxType::Unsigned(32);
const B32: PtxType = PtxType::Bits(32);

fn is_whole(ty: PtxType) -> bool {
    ty.is_integer() && ty.bits() > 8
}

fn is_bits(ty: PtxType) -> bool {
    matches!(ty, PtxType::Bits(16 | 32 | 64))
}

fn is_word(ty: PtxType) -> bool {
    ty.is_integer() && ty.bits() >= 32
}

impl Decoder {
    pub(super) fn instruction(&mut self, written: &InstructionText) -> DecodeResult<DecodedInstruction> {
        // The opcode is the first word; the form consumes the modifiers one by one, and what remains is an error.
        let mut words = written.name.split('.');
        let opcode = words.next().unwrap_or_default();
        let mut form = InstructionForm { written, modifiers: words.collect() };
        let guard = match &written.guard {
            None => None,
            Some((negated, name)) => Some((self.source(&form, &OperandText::Name(name.clone()), PREDICATE)?, *negated)),
        };
        let action = self.action(opcode, &mut form)?;
        form.done()?;
        // Constants and special registers are always written: only registers are checked during a run.
        let mut sources = action.sources();
        sources.retain(|&slot| self.slots[slot] == InitialValue::Unwritten);
        Ok(DecodedInstruction { line: written.line, name: written.name.clone(), guard, sources, action })
    }

    fn action(&mut self, opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        match opcode {
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "neg" | "abs" | "copysign" => {
                let ty = form.ty()?;
                if ty.is_float() { self.float(opcode, ty, form) } else { self.integer(opcode, ty, form) }
            }
            "ex2" | "lg2" | "rcp" | "sqrt" | "rsqrt" | "tanh" => self.function(opcode, form),
            "and" | "or" | "xor" | "not" | "shl" | "shr" | "shf" | "bfe" | "bfi" | "prmt" | "lop3" | "popc" | "clz"
            | "brev" => self.bitwise(opcode, form),
            "mov" => self.mov(form),
            "cvt" => self.cvt(form),
            "cvta" => self.cvta(form),
            "mapa" => {
                if !form.flag("shared::cluster") {
                    return form.error("expected .shared::cluster".into());
                }
                let ty = form.ty_of(|ty| ty == U32)?;
                let [to, address, rank] = form.operands()?;
                let (to, address) = (self.target(form, to, ty)?, self.source(form, address, ty)?);
                Ok(PtxOperation::Map { to, address, rank: self.source(form, rank, U32)? })
            }
            "setp" => self.setp(form),
            "testp" => self.testp(form),
            "selp" => {
                let ty =
                    form.ty_of(|ty| is_bits(ty) || is_whole(ty) || matches!(ty, PtxType::Float(FloatFormat::F32)))?;
                let [to, a, b, p] = form.operands()?;
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?, self.source(form, p, PREDICATE)?];
                let function = Box::new(|a, b, p| if p == 1 { a } else { b });
                Ok(PtxOperation::Compute { to: self.target(form, to, ty)?, of, function })
            }
            "ld" => self.load(form),
            "st" => self.store(form),
            "atom" | "red" => self.atomic(opcode, form),
            "cp" => self.copy(form),
            // A prefetch changes no result, but its operands must be right.
            "prefetch" => {
                let space = form.needs(&[("global", StateSpace::Global)])?;
                form.needs(&[("L1", ()), ("L2", ())])?;
                let [at] = form.operands()?;
                self.address(form, at, space)?;
                Ok(PtxOperation::Nothing)
            }
            // A policy changes no result, whatever it is.
            "createpolicy" => {
                form.needs(&[("fractional", ())])?;
                strip_hints(form);
                let ty = form.ty_of(|ty| ty == PtxType::Bits(64))?;
                let to = self.target(form, &form.some_operands(1, 2)?[0], ty)?;
                let of = [self.fill(InitialValue::Value(0)); 3];
                Ok(PtxOperation::Compute { to, of, function: Box::new(|x, _, _| x) })
            }
            "bra" => {
                let uniform = form.flag("uni");
                match form.operands()? {
                    [OperandText::Name(label)] => match self.labels.get(label) {
                        Some(&to) => Ok(PtxOperation::Branch { to, uniform }),
                        None => form.error(format!("there is no label {label}")),
                    },
                    _ => form.error("expected a label".into()),
                }
            }
            "exit" | "ret" => {
                form.flag("uni");
                form.operands::<0>()?;
                Ok(PtxOperation::Exit)
            }
            "mbarrier" => self.transaction_barrier(form),
            "bar" | "barrier" => self.barrier(opcode, form),
            "fence" | "membar" => fence(opcode, form),
            "shfl" => self.shuffle(form),
            "vote" => self.vote(form),
            "redux" => self.redux(form),
            "elect" => {
                form.needs(&[("sync", ())])?;
                let [to, members] = form.operands()?;
                match self.pair(form, to, B32, PREDICATE)? {
                    [to, Some(elected)] => {
                        Ok(PtxOperation::Elect { to, elected, members: self.source(form, members, B32)? })
                    }
                    [_, None] => form.error("expected a predicate after |".into()),
                }
            }
            "activemask" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                let [to] = form.operands()?;
                Ok(PtxOperation::ActiveMask { to: self.target(form, to, ty)? })
            }
            _ => form.error("the instruction is not known".into()),
        }
    }

    /// Decodes the form `to, a, b, c` with N operands of one type, and computes `function` of the sources.
    fn compute<const N: usize>(
        &mut self,
        form: &InstructionForm,
        ty: PtxType,
        function: LaneFunction,
    ) -> DecodeResult<PtxOperation> {
        let operands = form.some_operands(N, N)?;
        let to = self.target(form, &operands[0], ty)?;
        // Operands that an instruction lacks read a slot that holds 0.
        let mut of = [self.fill(InitialValue::Value(0)); 3];
        for (of, operand) in of.iter_mut().zip(&operands[1..]) {
            *of = self.source(form, operand, ty)?;
        }
        Ok(PtxOperation::Compute { to, of, function })
    }

    fn float(&mut self, opcode: &str, ty: PtxType, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        // bf16 has no .ftz: its subnormals are never flushed.
        let ftz = form.flag("ftz");
        let of_bf16 = matches!(ty, PtxType::Float(FloatFormat::Bf16) | PtxType::Two(FloatFormat::Bf16));
        if ftz && of_bf16 {
            return form.error("modifier .ftz is not supported here".into());
        }
        match opcode {
            "add" | "sub" | "mul" | "fma" => {
                let nearest = form.flag("rn");
                let saturate = ty == PtxType::Float(FloatFormat::F32) && form.flag("sat");
                let operation = match opcode {
                    "add" => RoundedOperation::Add,
                    "sub" => RoundedOperation::Sub,
                    "mul" => RoundedOperation::Mul,
                    _ if nearest => RoundedOperation::Fma,
                    _ => return form.error("expected .rn".into()),
                };
                let function = elementwise(ty, move |float, a, b, c| {
                    let result = round_once(float, operation, ftz, a, b, c);
                    if saturate { arithmetic::saturated(float, result) } else { result }
                });
                if opcode == "fma" {
                    self.compute::<4>(form, ty, function)
                } else {
                    self.compute::<3>(form, ty, function)
                }
            }
            // A pair of f32 has only the arithmetic above.
            "min" | "max" if ty != PtxType::Two(FloatFormat::F32) => {
                let nan = form.flag("NaN");
                let extreme = if opcode == "min" { arithmetic::smaller } else { arithmetic::larger };
                self.compute::<3>(form, ty, elementwise(ty, move |float, a, b, _| extreme(float, ftz, nan, a, b)))
            }
            "neg" | "abs" if ty != PtxType::Two(FloatFormat::F32) => {
                let absolute = opcode == "abs";
                let function = move |float, x, _, _| arithmetic::signs(float, ftz, absolute, x);
                self.compute::<2>(form, ty, elementwise(ty, function))
            }
            "copysign" if ty == PtxType::Float(FloatFormat::F32) && !ftz => {
                let sign = 1 << 31;
                // The sign is that of the first operand; NaN keeps its other bits.
                self.compute::<3>(form, ty, Box::new(move |a, b, _| a & sign | b & !sign))
            }
            "div" if ty == PtxType::Float(FloatFormat::F32) => {
                let function =
                    form.one_of(&[("approx", ApproximateFunction::Div), ("full", ApproximateFunction::DivFull)]);
                let [to, a, b] = form.operands()?;
                let (to, of) = (self.target(form, to, ty)?, [self.source(form, a, ty)?, self.source(form, b, ty)?]);
                match function {
                    Some(function) => Ok(PtxOperation::Approximate { to, of, function, ftz }),
                    None if form.flag("rn") => {
                        let function = elementwise(ty, move |float, a, b, _| arithmetic::quotient(float, ftz, a, b));
                        Ok(PtxOperation::Compute { to, of: [of[0], of[1], of[1]], function })
                    }
                    None => form.error("expected .approx, .full or .rn".into()),
                }
            }
            _ => form.error(format!("type {ty} is not supported")),
        }
    }

    fn integer(&mut self, opcode: &str, ty: PtxType, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        // Operands are read as numbers of the type, and results are cut to its width.
        let bits = ty.bits();
        if !is_whole(ty) {
            return form.error(format!("type {ty} is not supported"));
        }
        let cut = move |x| wrapped(x, bits);
        let of = move |x| whole(ty, x);
        match opcode {
            "add" => self.compute::<3>(form, ty, Box::new(move |a, b, _| a.wrapping_add(b) & mask(bits))),
            "sub" => self.compute::<3>(form, ty, Box::new(move |a, b, _| a.wrapping_sub(b) & mask(bits))),
            "min" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).min(of(b))))),
            "max" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).max(of(b))))),
            "neg" if ty.is_signed() => self.compute::<2>(form, ty, Box::new(move |a, _, _| cut(-of(a)))),
            "abs" if ty.is_signed() => self.compute::<2>(form, ty, Box::new(move |a, _, _| cut(of(a).abs()))),
            // By 0: all bits set, and the dividend as the remainder.
            "div" => self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).checked_div(of(b)).unwrap_or(-1)))),
            "rem" => {
                self.compute::<3>(form, ty, Box::new(move |a, b, _| cut(of(a).checked_rem(of(b)).unwrap_or(of(a)))))
            }
            "mul" | "mad" => {
                let part = form.needs(&[("lo", 0), ("hi", 1), ("wide", 2)])?;
                if part == 2 && bits == 64 {
                    return form.error(format!("type {ty} is not supported"));
                }
                // `.wide` has a result of twice the width, which no product overflows; `.hi` is the upper half of that.
                let wide = match ty {
                    PtxType::Signed(bits) => PtxType::Signed(2 * bits),
                    _ => PtxType::Unsigned(2 * bits),
                };
                let (sum, out) = if part == 2 { (wide, 2 * bits) } else { (ty, bits) };
                let function: LaneFunction = Box::new(move |a, b, c| {
                    let product = of(a).wrapping_mul(of(b));
                    let product = if part == 1 { product >> bits } else { product };
                    wrapped(product.wrapping_add(c.into()), out)
                });
                let operands = form.some_operands(3, 4)?;
                let of = [self.source(form, &operands[1], ty)?, self.source(form, &operands[2], ty)?];
                let c = match (opcode, operands) {
                    ("mul", [_, _, _]) => self.fill(InitialValue::Value(0)),
                    ("mad", [_, _, _, c]) => self.source(form, c, sum)?,
                    _ => return form.error(format!("{} operands are not right", operands.len())),
                };
                let to = self.target(form, &operands[0], sum)?;
                Ok(PtxOperation::Compute { to, of: [of[0], of[1], c], function })
            }
            _ => form.error(format!("type {ty} is not supported")),
        }
    }

    fn function(&mut self, opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty = form.ty_of(|ty| ty == PtxType::Float(FloatFormat::F32))?;
        let (approximately, nearest) = (form.flag("approx"), form.flag("rn"));
        let ftz = form.flag("ftz");
        let [to, a] = form.operands()?;
        let (to, a) = (self.target(form, to, ty)?, self.source(form, a, ty)?);
        // These have an approximate form, whose error the manual bounds; rcp and sqrt also a rounded one.
        let function = match opcode {
            "ex2" => ApproximateFunction::Ex2,
            "lg2" => ApproximateFunction::Lg2,
            "rcp" => ApproximateFunction::Rcp,
            "sqrt" => ApproximateFunction::Sqrt,
            "rsqrt" => ApproximateFunction::Rsqrt,
            _ if ftz => return form.error("modifier .ftz is not supported here".into()),
            _ => ApproximateFunction::Tanh,
        };
        match (function, approximately, nearest) {
            (_, true, false) => Ok(PtxOperation::Approximate { to, of: [a, a], function, ftz }),
            // f64 has more than twice the bits: what is rounded from it is rounded once.
            (ApproximateFunction::Rcp | ApproximateFunction::Sqrt, false, true) => {
                let function =
                    Box::new(move |a, _, _| approximate(function, super::ApproximateUnits::Rounded, ftz, a, 0));
                Ok(PtxOperation::Compute { to, of: [a; 3], function })
            }
            _ => form.error("expected .approx, or .rn of rcp and sqrt".into()),
        }
    }

    fn bitwise(&mut self, opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        match opcode {
            "and" | "or" | "xor" => {
                let ty = form.ty_of(|ty| is_bits(ty) || ty == PREDICATE)?;
                self.compute::<3>(form, ty, bitwise(opcode))
            }
            "not" => {
                let ty = form.ty_of(|ty| is_bits(ty) || ty == PREDICATE)?;
                self.compute::<2>(form, ty, Box::new(move |a, _, _| !a & mask(ty.bits())))
            }
            "shl" | "shr" => {
                let left = opcode == "shl";
                let ty = form.ty_of(|ty| is_bits(ty) || !left && is_whole(ty))?;
                let [to, a, by] = form.operands()?;
                let (to, a, by) = (self.target(form, to, ty)?, self.source(form, a, ty)?, self.source(form, by, U32)?);
                let function = Box::new(move |a, by, _| arithmetic::shifted(ty, left, a, by));
                Ok(PtxOperation::Compute { to, of: [a, by, by], function })
            }
            "shf" => {
                let left = form.needs(&[("l", true), ("r", false)])?;
                let wraps = form.needs(&[("wrap", true), ("clamp", false)])?;
                // A funnel shift takes 32 of the 64 bits of the pair `b:a`.
                let ty = form.ty_of(|ty| ty == B32)?;
                let function = move |a: u64, b: u64, c: u64| {
                    let by = if wraps { c & 31 } else { c.min(32) };
                    let both = a | b << 32;
                    if left { both << by >> 32 } else { both >> by & mask(32) }
                };
                self.compute::<4>(form, ty, Box::new(function))
            }
            "bfe" => {
                let ty = form.ty_of(is_word)?;
                let [to, a, start, length] = form.operands()?;
                let of = [self.source(form, a, ty)?, self.source(form, start, U32)?, self.source(form, length, U32)?];
                let function = Box::new(move |a, start, length| arithmetic::extracted(ty, a, start, length));
                Ok(PtxOperation::Compute { to: self.target(form, to, ty)?, of, function })
            }
            "bfi" => {
                let ty = form.ty_of(|ty| matches!(ty, PtxType::Bits(32 | 64)))?;
                let [to, a, b, OperandText::Number(start), OperandText::Number(length)] = form.operands()? else {
                    return form.error("a place that is not a number is not supported".into());
                };
                let (start, length) = (constant(form, *start, U32)?, constant(form, *length, U32)?);
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?];
                let function = Box::new(move |a, b, _| arithmetic::inserted(ty.bits(), a, b, start, length));
                Ok(PtxOperation::Compute { to: self.target(form, to, ty)?, of: [of[0], of[1], of[1]], function })
            }
            "prmt" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                self.compute::<4>(form, ty, Box::new(arithmetic::permuted))
            }
            "lop3" => {
                let ty = form.ty_of(|ty| ty == B32)?;
                let [to, a, b, c, OperandText::Number(table)] = form.operands()? else {
                    return form.error("expected a table as the last operand".into());
                };
                let table = constant(form, *table, U32)?;
                let of = [self.source(form, a, ty)?, self.source(form, b, ty)?, self.source(form, c, ty)?];
                let function = Box::new(move |a, b, c| arithmetic::looked_up(table, a, b, c));
                Ok(PtxOperation::Compute { to: self.target(form, to, ty)?, of, function })
            }
            _ => {
                let ty = form.ty_of(|ty| matches!(ty, PtxType::Bits(32 | 64)))?;
                let bits = ty.bits();
                let function: LaneFunction = match opcode {
                    "popc" => Box::new(|a: u64, _, _| a.count_ones().into()),
                    "clz" => Box::new(move |a: u64, _, _| u64::from(a.leading_zeros() - (64 - bits))),
                    _ => Box::new(move |a: u64, _, _| a.reverse_bits() >> (64 - bits)),
                };
                let [to, a] = form.operands()?;
                let to = self.target(form, to, if opcode == "brev" { ty } else { U32 })?;
                Ok(PtxOperation::Compute { to, of: [self.source(form, a, ty)?; 3], function })
            }
        }
    }

    fn mov(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty = form.ty_of(|ty| ty.bits() != 8)?;
        match form.operands()? {
            // Vectors of `mov` split a register into equal parts or join it from them; `_` drops a part.
            [OperandText::Vector(parts), of] => {
                let part = part_of(form, ty, parts.len())?;
                let to = parts.iter().map(|operand| match operand {
                    OperandText::Name(name) if name == "_" => Ok(None),
                    operand => self.target(form, operand, part).map(Some),
                });
                let to = to.collect::<DecodeResult<_>>()?;
                Ok(PtxOperation::Split { to, of: self.source(form, of, ty)?, bits: part.bits() })
            }
            [to, OperandText::Vector(parts)] => {
                let part = part_of(form, ty, parts.len())?;
                let of = parts.iter().map(|operand| self.source(form, operand, part)).collect::<DecodeResult<_>>()?;
                Ok(PtxOperation::Join { to: self.target(form, to, ty)?, of, bits: part.bits() })
            }
            _ => self.compute::<2>(form, ty, Box::new(|x, _, _| x)),
        }
    }

    fn cvt(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let from = form.ty()?;
        let to = form.ty()?;
        let integral = form.one_of(&INTEGRAL);
        let rounding = integral.or_else(|| form.one_of(&ROUNDINGS));
        let (ftz, saturate) = (form.flag("ftz"), form.flag("sat"));
        // Two f32 into a packed pair, each rounded by itself: the first source is the upper half.
        if let (PtxType::Two(float), Some(rounding), false) = (to, rounding, integral.is_some() || ftz || saturate)
            && from == PtxType::Float(FloatFormat::F32)
            && float != FloatFormat::F32
            && matches!(rounding, Rounding::Nearest | Rounding::Zero)
        {
            let [d, upper, lower] = form.operands()?;
            let of = [self.source(form, upper, from)?, self.source(form, lower, from)?];
            let function = Box::new(move |upper, lower, _| {
                let part = |x| arithmetic::rounded(float, arithmetic::value(FloatFormat::F32, x), rounding);
                part(upper) << 16 | part(lower)
            });
            return Ok(PtxOperation::Compute { to: self.target(form, d, to)?, of: [of[0], of[1], of[1]], function });
        }
        let Some(function) = conversion(to, from, rounding, integral.is_some(), ftz, saturate) else {
            return form.error("there is no such conversion, or it is not supported".into());
        };
        let [d, a] = form.operands()?;
        let (d, bits) = self.loose_target(form, d, to)?;
        let a = self.any_source(form, a, from, PtxType::serves_loosely)?;
        let function = Box::new(move |x, _, _| arithmetic::widened(to, function(x, 0, 0), bits));
        Ok(PtxOperation::Compute { to: d, of: [a; 3], function })
    }

    /// Decodes `cvta` between generic and global addresses, which are equal here; those of shared memory are not supported.
    fn cvta(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.flag("to");
        form.needs(&[("global", ())])?;
        let ty = form.ty_of(|ty| ty == PtxType::Unsigned(64))?;
        self.compute::<2>(form, ty, Box::new(|x, _, _| x))
    }

    fn setp(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        use PtxComparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual, Ordered, Unordered};
        let ty = form.ty_of(|ty| is_bits(ty) || is_whole(ty) || matches!(ty, PtxType::Float(_)))?;
        let ftz = matches!(ty, PtxType::Float(FloatFormat::F32 | FloatFormat::F16)) && form.flag("ftz");
        let of_bits = [("eq", (Equal, false)), ("ne", (NotEqual, false))];
        let signed = [
            ("lt", (Less, false)),
            ("le", (LessOrEqual, false)),
            ("gt", (Greater, false)),
            ("ge", (GreaterOrEqual, false)),
        ];
        let unsigned = [
            ("lo", (Less, false)),
            ("ls", (LessOrEqual, false)),
            ("hi", (Greater, false)),
            ("hs", (GreaterOrEqual, false)),
        ];
        let floats = [
            ("equ", (Equal, true)),
            ("neu", (NotEqual, true)),
            ("ltu", (Less, true)),
            ("leu", (LessOrEqual, true)),
            ("gtu", (Greater, true)),
            ("geu", (GreaterOrEqual, true)),
            ("num", (Ordered, false)),
            ("nan", (Unordered, false)),
        ];
        // Bits have no order; unsigned numbers have names of their own for theirs, and floats relations that hold for NaN.
        let mut choices = of_bits.to_vec();
        if !is_bits(ty) {
            choices.extend(signed);
        }
        match ty {
            PtxType::Unsigned(_) => choices.extend(unsigned),
            PtxType::Float(_) => choices.extend(floats),
            _ => {}
        }
        let (comparison, unordered) = form.needs(&choices)?;
        // A third source may be combined with the relation, for both predicates alike.
        let combine = form.one_of(&[("and", 0), ("or", 1), ("xor", 2)]);
        let operands = form.some_operands(3, 4)?;
        let to = self.pair(form, &operands[0], PREDICATE, PREDICATE)?;
        let of = [self.source(form, &operands[1], ty)?, self.source(form, &operands[2], ty)?];
        let (with, negated) = match (combine, operands) {
            (None, [_, _, _]) => (self.fill(InitialValue::Value(0)), false),
            (Some(_), [_, _, _, with]) => self.predicate(form, with)?,
            _ => return form.error(format!("{} operands are not right", operands.len())),
        };
        let function = Box::new(move |a, b, with| {
            let holds = compares(ty, comparison, unordered, ftz, a, b);
            let with = (with == 1) != negated;
            [holds, !holds].map(|holds| match combine {
                None => holds,
                Some(0) => holds & with,
                Some(1) => holds | with,
                Some(_) => holds ^ with,
            })
        });
        Ok(PtxOperation::Compare { to, of: [of[0], of[1], with], function })
    }

    fn testp(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty = form.ty_of(|ty| ty == PtxType::Float(FloatFormat::F32))?;
        let test: fn(f32) -> bool = form.needs(&[
            ("finite", f32::is_finite as fn(f32) -> bool),
            ("infinite", f32::is_infinite),
            ("number", |x| !x.is_nan()),
            ("notanumber", f32::is_nan),
            ("normal", f32::is_normal),
            ("subnormal", f32::is_subnormal),
        ])?;
        let [to, a] = form.operands()?;
        let function = Box::new(move |x, _, _| u64::from(test(f32::from_bits(x as u32))));
        Ok(PtxOperation::Compute {
            to: self.target(form, to, PREDICATE)?,
            of: [self.source(form, a, ty)?; 3],
            function,
        })
    }
}

/// Returns the bitwise function of `and`, `or` or `xor`.
fn bitwise(opcode: &str) -> LaneFunction {
    match opcode {
        "and" => Box::new(|a, b, _| a & b),
        "or" => Box::new(|a, b, _| a | b),
        _ => Box::new(|a, b, _| a ^ b),
    }
}

/// Returns the type of each of `parts` equal parts of a `ty`.
fn part_of(form: &InstructionForm, ty: PtxType, parts: usize) -> DecodeResult<PtxType> {
    match (ty, parts) {
        (PtxType::Bits(bits), 2 | 4) if bits / parts as u32 >= 16 => Ok(PtxType::Bits(bits / parts as u32)),
        _ => form.error(format!("{parts} parts of {ty} are not supported")),
    }
}
