//! The forms of instructions that threads execute together, and of fences.

use crate::arithmetic::{LaneFunction, mask, whole, wrapped};
use crate::decode::{DecodeResult, Decoder, InstructionForm};
use crate::instruction::{BarrierReduction, PredicateReduction, PtxOperation, ShuffleMode, VoteMode};
use crate::types::PREDICATE;

use super::{B32, SCOPES, U32, bitwise};

impl Decoder {
    pub(super) fn barrier(&mut self, opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        if opcode == "bar" && form.flag("warp") {
            form.needs(&[("sync", ())])?;
            let [members] = form.operands()?;
            return Ok(PtxOperation::WarpBarrier { members: self.source(form, members, B32)? });
        }
        // `bar` means `barrier.aligned`: all threads of the warp must arrive together.
        let aligned = form.flag("aligned") || opcode == "bar";
        if opcode == "barrier" && form.flag("cluster") {
            form.operands::<0>()?;
            // An arrival without .release or .relaxed releases.
            if form.needs(&[("arrive", true), ("wait", false)])? {
                let release = form.one_of(&[("release", true), ("relaxed", false)]).unwrap_or(true);
                return Ok(PtxOperation::ClusterArrive { release, aligned });
            }
            form.flag("acquire");
            return Ok(PtxOperation::ClusterWait { aligned });
        }
        form.flag("cta");
        if form.flag("red") {
            let mode = form.needs(&[
                ("popc", BarrierReduction::Count),
                ("and", BarrierReduction::All),
                ("or", BarrierReduction::Any),
            ])?;
            let ty = form.ty_of(|ty| ty == if mode == BarrierReduction::Count { U32 } else { PREDICATE })?;
            let operands = form.some_operands(3, 4)?;
            let (to, id) = (self.target(form, &operands[0], ty)?, self.source(form, &operands[1], U32)?);
            let threads = if operands.len() == 4 { Some(self.source(form, &operands[2], U32)?) } else { None };
            let (of, negated) = self.predicate(form, &operands[operands.len() - 1])?;
            let reduces = Some(PredicateReduction { to, of, negated, mode });
            return Ok(PtxOperation::Barrier { id, threads, aligned, waits: true, reduces });
        }
        // An arrival that does not wait must say how many threads the barrier is for.
        let waits = form.needs(&[("sync", true), ("arrive", false)])?;
        let operands = form.some_operands(if waits { 1 } else { 2 }, 2)?;
        let id = self.source(form, &operands[0], U32)?;
        let threads = operands.get(1).map(|threads| self.source(form, threads, U32)).transpose()?;
        Ok(PtxOperation::Barrier { id, threads, aligned, waits, reduces: None })
    }

    pub(super) fn shuffle(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.needs(&[("sync", ())])?;
        let mode = form.needs(&[
            ("up", ShuffleMode::Up),
            ("down", ShuffleMode::Down),
            ("bfly", ShuffleMode::Butterfly),
            ("idx", ShuffleMode::Index),
        ])?;
        let ty = form.ty_of(|ty| ty == B32)?;
        let [to, of, by, clamp, members] = form.operands()?;
        let [Some(to), valid] = self.pair(form, to, ty, PREDICATE)? else {
            return form.error("expected a register".into());
        };
        let [of, members] = [of, members].map(|operand| self.source(form, operand, ty));
        let [by, clamp] = [by, clamp].map(|operand| self.source(form, operand, B32));
        Ok(PtxOperation::Shuffle { mode, to, valid, of: of?, by: by?, clamp: clamp?, members: members? })
    }

    pub(super) fn vote(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.needs(&[("sync", ())])?;
        let mode = form.needs(&[
            ("all", VoteMode::All),
            ("any", VoteMode::Any),
            ("uni", VoteMode::Uniform),
            ("ballot", VoteMode::Ballot),
        ])?;
        let ty = form.ty_of(|ty| ty == if mode == VoteMode::Ballot { B32 } else { PREDICATE })?;
        let [to, of, members] = form.operands()?;
        let (of, negated) = self.predicate(form, of)?;
        Ok(PtxOperation::Vote {
            mode,
            to: self.target(form, to, ty)?,
            of,
            negated,
            members: self.source(form, members, B32)?,
        })
    }

    pub(super) fn redux(&mut self, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
        form.needs(&[("sync", ())])?;
        let ty = form.ty_of(|ty| ty.bits() == 32 && !ty.is_float())?;
        let function: LaneFunction = if ty.is_integer() {
            match form.needs(&[("add", 0), ("min", 1), ("max", 2)])? {
                0 => Box::new(|a, b, _| a.wrapping_add(b) & mask(32)),
                1 => Box::new(move |a, b, _| wrapped(whole(ty, a).min(whole(ty, b)), 32)),
                _ => Box::new(move |a, b, _| wrapped(whole(ty, a).max(whole(ty, b)), 32)),
            }
        } else {
            bitwise(form.needs(&["and", "or", "xor"].map(|word| (word, word)))?)
        };
        let [to, of, members] = form.operands()?;
        let (of, members) = (self.source(form, of, ty)?, self.source(form, members, B32)?);
        Ok(PtxOperation::Reduce { to: self.target(form, to, ty)?, of, members, function })
    }
}

/// Decodes `fence` and `membar`, of which only the scope matters here.
pub(super) fn fence(opcode: &str, form: &mut InstructionForm) -> DecodeResult<PtxOperation> {
    form.operands::<0>()?;
    if opcode == "membar" {
        let beyond_cta = form.needs(&[("cta", false), ("gl", true), ("sys", true)])?;
        return Ok(PtxOperation::Fence { beyond_cta });
    }
    if form.flag("mbarrier_init") {
        form.needs(&[("release", ())])?;
        form.needs(&[("cluster", ())])?;
        return Ok(PtxOperation::FenceInitialised);
    }
    form.one_of(&[("sc", ()), ("acq_rel", ())]);
    Ok(PtxOperation::Fence { beyond_cta: form.needs(&SCOPES)? })
}
