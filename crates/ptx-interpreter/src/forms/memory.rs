//! The forms of instructions on memory: loads, stores, atomic operations, asynchronous copies and mbarriers.

use crate::decode::{DecodeResult, Decoder, InstructionForm, Symbol, constant};
use crate::instruction::{AtomicOperation, InitialValue, PtxOperation, StateSpace};
use crate::parse::{NumberText, OperandText};
use crate::transaction::AcquireScope;
use crate::types::{FloatFormat, PREDICATE, PtxType};

use super::{SCOPES, U32, is_word};

/// The state spaces of an access, by their modifiers.
const SPACES: [(&str, StateSpace); 4] = [
    ("global", StateSpace::Global),
    ("shared", StateSpace::Shared),
    ("shared::cta", StateSpace::Shared),
    ("shared::cluster", StateSpace::Cluster),
];
/// The widths of vectors, in elements, by their modifiers.
const WIDTHS: [(&str, u32); 2] = [("v2", 2), ("v4", 4)];

/// The modifiers of caches and eviction, which change no result.
const HINTS: [&str; 19] = [
    "weak",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "wb",
    "wt",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
];

impl Decoder {
    pub(super) fn load(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty = form.ty_of(|ty| ty != PREDICATE)?;
        if form.flag("param") {
            return self.load_parameter(form, ty);
        }
        let space = form.needs(&SPACES)?;
        let read_only = space == StateSpace::Global && form.flag("nc");
        let width = form.one_of(&WIDTHS);
        let operands = self.without_policy(form, 2)?;
        let from = self.address(form, &operands[1], space)?;
        let parts = vector(form, &operands[0], width, ty)?;
        // The registers may be wider than the elements; `_` drops an element, which is read all the same.
        let mut register_bits = ty.bits();
        let mut to = Vec::new();
        for operand in parts {
            if matches!(operand, OperandText::Name(name) if name == "_") {
                to.push(None);
                continue;
            }
            let (slot, bits) = self.loose_target(form, operand, ty)?;
            register_bits = bits;
            to.push(Some(slot));
        }
        Ok(PtxOperation::Load { space, from, ty, to, register_bits, read_only })
    }

    fn load_parameter(&mut self, form: &mut InstructionForm, ty: PtxType) -> DecodeResult<PtxOperation> {
        let [to, OperandText::Address(base, 0)] = form.operands()? else {
            return form.error("expected a parameter in [ ]".into());
        };
        let parameter = match &**base {
            OperandText::Name(name) => self.parameters.get(name),
            _ => None,
        };
        match parameter {
            // A pointer is a constant of the launch, so the load is a move from its slot.
            Some(&parameter) if ty.bits() == 64 && !ty.is_float() => {
                let of = [self.fill(InitialValue::Parameter(parameter)); 3];
                Ok(PtxOperation::Compute { to: self.target(form, to, ty)?, of, function: Box::new(|x, _, _| x) })
            }
            Some(_) => form.error(format!("a pointer has 64 bits, not those of {ty}")),
            None => form.error("there is no such parameter".into()),
        }
    }

    pub(super) fn store(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        if form.flag("async") {
            return self.store_async(form);
        }
        let ty = form.ty_of(|ty| ty != PREDICATE)?;
        let space = form.needs(&SPACES)?;
        let width = form.one_of(&WIDTHS);
        let operands = self.without_policy(form, 2)?;
        let to = self.address(form, &operands[0], space)?;
        let parts = vector(form, &operands[1], width, ty)?;
        let of = parts.iter().map(|operand| self.any_source(form, operand, ty, PtxType::serves_loosely));
        let of = of.collect::<DecodeResult<_>>()?;
        Ok(PtxOperation::Store { space, to, bytes: ty.bits() / 8, of })
    }

    fn store_async(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty = form.ty_of(|ty| !matches!(ty, PtxType::Two(_)) && ty.bits() >= 32)?;
        form.flag("weak");
        form.needs(&[("shared::cluster", ())])?;
        form.needs(&[("mbarrier::complete_tx::bytes", ())])?;
        let width = form.one_of(&WIDTHS);
        let [to, value, barrier] = form.operands()?;
        let [to, barrier] = [to, barrier].map(|operand| self.address(form, operand, StateSpace::Cluster));
        let parts = vector(form, value, width, ty)?;
        let of = parts.iter().map(|operand| self.source(form, operand, ty)).collect::<DecodeResult<_>>()?;
        Ok(PtxOperation::StoreAsync { to: to?, bytes: ty.bits() / 8, of, barrier: barrier? })
    }

    pub(super) fn transaction_barrier(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.ty_of(|ty| ty == PtxType::Bits(64))?;
        form.needs(&[("shared", ()), ("shared::cta", ())])?;
        if form.flag("init") {
            let [at, count] = form.operands()?;
            let at = self.address(form, at, StateSpace::Shared)?;
            return Ok(PtxOperation::InitialiseBarrier { at, count: self.source(form, count, U32)? });
        }
        if form.flag("arrive") {
            let expects = form.flag("expect_tx");
            let releases = form.one_of(&[("release", true), ("relaxed", false)]).unwrap_or(true);
            form.one_of(&[("cta", ()), ("cluster", ())]);
            let count = 2 + usize::from(expects);
            let operands = form.some_operands(count, count)?;
            if !matches!(&operands[0], OperandText::Name(name) if name == "_") {
                return form.error("a state that is kept is not supported, expected _".into());
            }
            let at = self.address(form, &operands[1], StateSpace::Shared)?;
            let bytes = operands.get(2).map(|bytes| self.source(form, bytes, U32)).transpose()?;
            return Ok(PtxOperation::ArriveAtBarrier { at, bytes, releases });
        }
        form.needs(&[("try_wait", ())])?;
        form.needs(&[("parity", ())])?;
        let acquires = form.one_of(&[("acquire", true), ("relaxed", false)]).unwrap_or(true);
        let scope = form.one_of(&[("cta", AcquireScope::OfCta), ("cluster", AcquireScope::OfCluster)]);
        let acquires = if acquires { scope.unwrap_or(AcquireScope::OfCta) } else { AcquireScope::Nothing };
        let [complete, at, parity] = form.operands()?;
        let (complete, at) = (self.target(form, complete, PREDICATE)?, self.address(form, at, StateSpace::Shared)?);
        Ok(PtxOperation::TryWait { complete, at, parity: self.source(form, parity, U32)?, acquires })
    }

    /// The operands but for a cache policy, which changes no result.
    fn without_policy<'a>(&mut self, form: &mut InstructionForm<'a>, count: usize) -> DecodeResult<&'a [OperandText]> {
        let has_policy = form.flag("L2::cache_hint");
        strip_hints(form);
        let all = form.some_operands(count, count + usize::from(has_policy))?;
        // The policy of a cache is an operand without effect, but it must be a register that was written.
        if has_policy {
            match all.get(count) {
                Some(policy) => self.source(form, policy, PtxType::Bits(64))?,
                None => return form.error("expected a cache policy as the last operand".into()),
            };
        }
        Ok(&all[..count])
    }

    pub(super) fn atomic(&mut self, opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        let ty =
            form.ty_of(|ty| is_word(ty) || matches!(ty, PtxType::Bits(32 | 64) | PtxType::Float(FloatFormat::F32)))?;
        form.flag("relaxed");
        form.one_of(&SCOPES);
        let space = form.needs(&SPACES)?;
        let (whole, bits) = (ty.is_integer(), matches!(ty, PtxType::Bits(_)));
        let operation = form.needs(&[
            ("add", AtomicOperation::Add),
            ("min", AtomicOperation::Min),
            ("max", AtomicOperation::Max),
            ("and", AtomicOperation::And),
            ("or", AtomicOperation::Or),
            ("xor", AtomicOperation::Xor),
            ("exch", AtomicOperation::Exchange),
            ("cas", AtomicOperation::CompareAndSwap),
            ("inc", AtomicOperation::Increment),
            ("dec", AtomicOperation::Decrement),
        ])?;
        // The types that each operation has; the manual gives `exch` and `cas` no form without a result.
        let fits = match operation {
            AtomicOperation::Add => !bits,
            AtomicOperation::Min | AtomicOperation::Max => whole,
            AtomicOperation::Increment | AtomicOperation::Decrement => ty == U32,
            AtomicOperation::Exchange | AtomicOperation::CompareAndSwap => bits && opcode == "atom",
            AtomicOperation::And | AtomicOperation::Or | AtomicOperation::Xor => bits,
        };
        if !fits {
            return form.error(format!("type {ty} is not supported"));
        }
        // `atom` returns the old value in its first operand, which `red` does not have.
        let sources = if operation == AtomicOperation::CompareAndSwap { 2 } else { 1 };
        let first = usize::from(opcode == "atom");
        let operands = form.some_operands(first + 1 + sources, first + 1 + sources)?;
        let to = operands[..first].iter().map(|to| self.target(form, to, ty)).collect::<DecodeResult<Vec<_>>>()?;
        let at = self.address(form, &operands[first], space)?;
        let of = operands[first + 1..].iter().map(|of| self.source(form, of, ty)).collect::<DecodeResult<Vec<_>>>()?;
        let of = [of[0], *of.last().expect("there is one")];
        Ok(PtxOperation::Atomic { space, at, ty, operation, to: to.first().copied(), of })
    }

    pub(super) fn copy(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.needs(&[("async", ())])?;
        if form.flag("commit_group") {
            form.operands::<0>()?;
            return Ok(PtxOperation::CommitCopies);
        }
        if form.flag("wait_all") {
            form.operands::<0>()?;
            return Ok(PtxOperation::WaitAllCopies);
        }
        if form.flag("wait_group") {
            let [OperandText::Number(groups)] = form.operands()? else { return form.error("expected a number".into()) };
            return Ok(PtxOperation::WaitCopies(constant(form, *groups, U32)? as usize));
        }
        let whole_only = form.needs(&[("cg", true), ("ca", false)])?;
        form.needs(&[("shared", ()), ("shared::cta", ())])?;
        form.needs(&[("global", ())])?;
        let has_policy = form.flag("L2::cache_hint");
        strip_hints(form);
        let operands = form.some_operands(3, 4 + usize::from(has_policy))?;
        let (to, from) = (
            self.address(form, &operands[0], StateSpace::Shared)?,
            self.address(form, &operands[1], StateSpace::Global)?,
        );
        let bytes = match operands[2] {
            OperandText::Number(NumberText::Whole(16)) => 16,
            OperandText::Number(NumberText::Whole(4)) if !whole_only => 4,
            OperandText::Number(NumberText::Whole(8)) if !whole_only => 8,
            _ => return form.error("expected a size of 4, 8 or 16 bytes, of 16 with .cg".into()),
        };
        // After the size come, each optional, the bytes to read or a predicate to read none, and a cache policy.
        let mut rest = &operands[3..];
        if has_policy {
            let Some((policy, before)) = rest.split_last() else {
                return form.error("expected a cache policy as the last operand".into());
            };
            self.source(form, policy, PtxType::Bits(64))?;
            rest = before;
        }
        let (mut read, mut ignore) = (None, None);
        if let [operand] = rest {
            let is_predicate = match operand {
                OperandText::Name(name) => matches!(self.named(name), Some(Symbol::Register(_, PtxType::Pred))),
                _ => false,
            };
            if is_predicate {
                ignore = Some(self.source(form, operand, PREDICATE)?);
            } else {
                read = Some(self.source(form, operand, U32)?);
            }
        }
        Ok(PtxOperation::Copy { to, from, bytes, read, ignore })
    }
}

/// Removes the modifiers that only advise caches.
pub(super) fn strip_hints(form: &mut InstructionForm) {
    form.modifiers.retain(|modifier| !HINTS.contains(modifier));
}

/// Returns the one operand of a scalar access, or the parts of a vector of `width` elements.
fn vector<'a>(
    form: &InstructionForm,
    operand: &'a OperandText,
    width: Option<u32>,
    ty: PtxType,
) -> DecodeResult<&'a [OperandText]> {
    match (operand, width) {
        (OperandText::Vector(parts), Some(width)) if parts.len() == width as usize => {
            if width * ty.bits() > 128 {
                return form.error(format!("{width} of {ty} are more than 16 bytes"));
            }
            Ok(parts)
        }
        (OperandText::Vector(parts), _) => {
            form.error(format!("a vector of {} is not what the modifier says", parts.len()))
        }
        (_, Some(width)) => form.error(format!("expected a vector of {width}")),
        (operand, None) => Ok(std::slice::from_ref(operand)),
    }
}
