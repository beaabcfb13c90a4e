//! Writes the text of a kernel, instruction by instruction.

use std::fmt::Write as _;

use crate::value::{ELEMENTS, PtxElement, PtxInteger, PtxNumber, PtxStorable, PtxValue};
use crate::{ALIGNMENT, Parameter, PtxKernel, PtxLaunch, PtxTarget, Role};
use assay_core::device_dtype::DeviceDtype;

/// An address, and how many bytes are added to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PtxAddress {
    /// An address in global memory.
    Global(PtxValue<u64>, u32),
    /// An address in the shared memory of this thread's CTA.
    Shared(PtxValue<u32>, u32),
    /// An address in the shared memory of any CTA of the cluster.
    Cluster(PtxValue<u32>, u32),
}

impl PtxAddress {
    /// Returns the address that is `bytes` further.
    #[must_use]
    pub fn plus(self, bytes: u32) -> Self {
        match self {
            Self::Global(base, offset) => Self::Global(base, offset + bytes),
            Self::Shared(base, offset) => Self::Shared(base, offset + bytes),
            Self::Cluster(base, offset) => Self::Cluster(base, offset + bytes),
        }
    }

    fn space(self) -> &'static str {
        match self {
            Self::Global(..) => "global",
            Self::Shared(..) => "shared",
            Self::Cluster(..) => "shared::cluster",
        }
    }
}

impl std::fmt::Display for PtxAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self {
            Self::Global(base, 0) => write!(f, "[{base}]"),
            Self::Shared(base, 0) | Self::Cluster(base, 0) => write!(f, "[{base}]"),
            Self::Global(base, offset) => write!(f, "[{base}+{offset}]"),
            Self::Shared(base, offset) | Self::Cluster(base, offset) => write!(f, "[{base}+{offset}]"),
        }
    }
}

/// Two numbers of 16 bits in one register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedFloat {
    /// Two bf16 values in one 32-bit register.
    Bf16,
    /// Two f16 values in one 32-bit register.
    F16,
}

impl PackedFloat {
    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// The memory accesses of a thread that the threads waiting at the cluster's barrier may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// All earlier accesses of the thread are visible to the threads that wait.
    Release,
    /// None: it says no more than that the thread is there.
    Relaxed,
}

/// Writes a kernel. Every instruction defines a register of its own but [`set`](Self::set).
pub struct PtxBuilder {
    name: String,
    target: PtxTarget,
    parameters: Vec<Parameter>,
    /// The number of registers used so far of each [type](ELEMENTS).
    registers: [u32; ELEMENTS.len()],
    labels: u32,
    /// Declarations of shared memory in the entry.
    shared: String,
    /// Dynamic shared memory, if there is some.
    dynamic: Option<u32>,
    /// The version of PTX, which some instructions raise above the target's.
    version: &'static str,
    body: String,
}

impl PtxBuilder {
    /// An entry called `name` for `target`.
    pub fn new(name: impl Into<String>, target: PtxTarget) -> Self {
        Self {
            name: name.into(),
            target,
            parameters: Vec::new(),
            registers: [0; ELEMENTS.len()],
            labels: 0,
            shared: String::new(),
            dynamic: None,
            version: target.version(),
            body: String::new(),
        }
    }

    /// Returns the finished kernel, to be launched as `launch` says.
    pub fn finish(mut self, launch: PtxLaunch) -> PtxKernel {
        // Every way through the kernel ends in a return.
        self.write("ret");
        let PtxLaunch { grid, block, cluster, least_resident } = launch;
        let mut text = format!(".version {}\n.target {}\n.address_size 64\n\n", self.version, self.target.name());
        // Dynamic shared memory has no size in the text: the launch gives it.
        if self.dynamic.is_some() {
            text += &format!(".extern .shared .align 16 .b8 {DYNAMIC}[];\n\n");
        }
        let parameters: Vec<String> = self
            .parameters
            .iter()
            .map(|Parameter { name, alignment, .. }| format!("\t.param .u64 .ptr .global .align {alignment} {name}"))
            .collect();
        // The sizes of CTA and cluster are part of the text, so that the assembler knows how many threads share the
        // registers.
        let _ = writeln!(text, ".visible .entry {}(\n{}\n)", self.name, parameters.join(",\n"));
        let [x, y, z] = block;
        let _ = writeln!(text, ".reqntid {x}, {y}, {z}\n.minnctapersm {least_resident}");
        if cluster > 1 {
            let _ = writeln!(text, ".explicitcluster\n.reqnctapercluster {cluster}, 1, 1");
        }
        text += "{\n";
        // Registers of the text are virtual: each type's are declared by their number, and the assembler maps them to
        // real ones.
        for ((declared, prefix), count) in ELEMENTS.iter().zip(self.registers) {
            if count > 0 {
                let _ = writeln!(text, "\t.reg {declared} {prefix}<{count}>;");
            }
        }
        text += &self.shared;
        text += &self.body;
        text += "}\n";
        PtxKernel {
            name: self.name,
            text,
            grid,
            block,
            cluster,
            shared_bytes: self.dynamic.unwrap_or(0),
            parameters: self.parameters,
        }
    }

    fn write(&mut self, instruction: &str) {
        let _ = writeln!(self.body, "\t{instruction};");
    }

    fn new_register<T: PtxElement>(&mut self) -> PtxValue<T> {
        let count = &mut self.registers[T::PLACE];
        *count += 1;
        PtxValue::register(*count - 1)
    }

    /// Writes `instruction result, operands` and returns the new result register.
    fn define<T: PtxElement>(&mut self, instruction: &str, operands: &str) -> PtxValue<T> {
        let result = self.new_register();
        self.write(&format!("{instruction} {result}, {operands}"));
        result
    }

    fn binary<T: PtxElement, R: PtxElement>(
        &mut self,
        instruction: &str,
        a: PtxValue<T>,
        b: PtxValue<T>,
    ) -> PtxValue<R> {
        self.define(instruction, &format!("{a}, {b}"))
    }
}

/// Instructions that declare parameters and access memory.
impl PtxBuilder {
    /// Adds an array that is read, and returns its address, a multiple of [`ALIGNMENT`].
    pub fn input(&mut self, name: &str, dtype: DeviceDtype, shape: &[usize]) -> PtxValue<u64> {
        self.input_aligned(ALIGNMENT, name, dtype, shape)
    }

    /// Adds an array that is read, and returns its address, a multiple of `alignment`, a power of two: the size of the
    /// largest access that is made of it.
    pub fn input_aligned(&mut self, alignment: u64, name: &str, dtype: DeviceDtype, shape: &[usize]) -> PtxValue<u64> {
        self.parameter(name, dtype, shape, alignment, Role::Input)
    }

    /// Adds an array that is written, and returns its address, a multiple of [`ALIGNMENT`].
    pub fn output(&mut self, name: &str, dtype: DeviceDtype, shape: &[usize]) -> PtxValue<u64> {
        self.output_aligned(ALIGNMENT, name, dtype, shape)
    }

    /// Adds an array that is written, and returns its address, aligned as that of [`input_aligned`](Self::input_aligned).
    pub fn output_aligned(&mut self, alignment: u64, name: &str, dtype: DeviceDtype, shape: &[usize]) -> PtxValue<u64> {
        self.parameter(name, dtype, shape, alignment, Role::Output { over: None })
    }

    /// An array that is written over the input called `over`.
    pub fn output_over(&mut self, name: &str, over: &str) -> PtxValue<u64> {
        let place = self.parameters.iter().position(|parameter| parameter.name == over);
        let place = place.unwrap_or_else(|| panic!("output over `{over}`: no such input"));
        // Both parameters are pointers of their own with the same value, as an XLA call passes them.
        let Parameter { dtype, shape, alignment, .. } = self.parameters[place].clone();
        self.parameter(name, dtype, &shape, alignment, Role::Output { over: Some(place) })
    }

    fn parameter(
        &mut self,
        name: &str,
        dtype: DeviceDtype,
        shape: &[usize],
        alignment: u64,
        role: Role,
    ) -> PtxValue<u64> {
        self.parameters.push(Parameter { name: name.into(), dtype, shape: shape.to_vec(), alignment, role });
        self.define("ld.param.u64", &format!("[{name}]"))
    }

    /// `bytes` of shared memory of this CTA, at multiples of 16, and their address.
    pub fn shared(&mut self, name: &str, bytes: u32) -> PtxValue<u32> {
        let _ = writeln!(self.shared, "\t.shared .align 16 .b8 {name}[{bytes}];");
        self.define("mov.u32", name)
    }

    /// Reserves dynamic shared memory, whose size is given at launch, and returns its address. A kernel has at most
    /// one such array.
    pub fn dynamic_shared(&mut self, bytes: u32) -> PtxValue<u32> {
        assert!(self.dynamic.is_none(), "dynamic shared memory is there already");
        self.dynamic = Some(bytes);
        self.define("mov.u32", DYNAMIC)
    }

    /// The address that `address` of this CTA's shared memory has in CTA `rank` of the cluster.
    pub fn cluster_address(&mut self, address: PtxValue<u32>, rank: impl Into<PtxValue<u32>>) -> PtxValue<u32> {
        self.binary("mapa.shared::cluster.u32", address, rank.into())
    }

    /// Reads one value from memory.
    pub fn load<T: PtxStorable>(&mut self, from: PtxAddress) -> PtxValue<T> {
        self.define(&format!("ld.{}.{}", from.space(), T::BITS), &from.to_string())
    }

    /// Reads `N` values that follow one another; aligned to all of them.
    pub fn load_all<T: PtxStorable, const N: usize>(&mut self, from: PtxAddress) -> [PtxValue<T>; N] {
        let values: [PtxValue<T>; N] = std::array::from_fn(|_| self.new_register());
        self.write(&format!("ld.{}.v{N}.{} {}, {from}", from.space(), T::BITS, list(&values)));
        values
    }

    /// Writes one value to memory.
    pub fn store<T: PtxStorable>(&mut self, to: PtxAddress, value: impl Into<PtxValue<T>>) {
        let value = value.into();
        self.write(&format!("st.{}.{} {to}, {value}", to.space(), T::BITS));
    }

    /// Writes `N` values that follow one another; aligned to all of them.
    pub fn store_all<T: PtxStorable, const N: usize>(&mut self, to: PtxAddress, values: [PtxValue<T>; N]) {
        self.write(&format!("st.{}.v{N}.{} {to}, {}", to.space(), T::BITS, list(&values)));
    }

    /// Copies 16 bytes from global to shared memory, past the first cache. Nobody may look at them before
    /// [`wait_for_copies`](Self::wait_for_copies).
    pub fn copy_16(&mut self, to: PtxAddress, from: PtxAddress) {
        self.write(&format!("cp.async.cg.shared.global {to}, {from}, 16"));
    }

    /// Copies 4 bytes from global to shared memory asynchronously.
    pub fn copy_4(&mut self, to: PtxAddress, from: PtxAddress) {
        self.write(&format!("cp.async.ca.shared.global {to}, {from}, 4"));
    }

    /// Makes a barrier of 8 bytes of this CTA's shared memory, whose phases end when one thread has
    /// [arrived](Self::expect_bytes) and as many bytes as that expects were [stored](Self::store_async).
    pub fn init_barrier(&mut self, barrier: PtxAddress) {
        self.write(&format!("mbarrier.init.shared::cta.b64 {barrier}, 1"));
    }

    /// Lets the barriers that this thread has made be known by its next arrival at the cluster's barrier, a relaxed one too.
    pub fn fence_barriers(&mut self) {
        self.write("fence.mbarrier_init.release.cluster");
    }

    /// Arrives at a barrier of this CTA, whose phase then waits for so many bytes.
    pub fn expect_bytes(&mut self, barrier: PtxAddress, bytes: u32) {
        self.write(&format!("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, {barrier}, {bytes}"));
    }

    /// Writes a value to a CTA of the cluster, and counts its bytes on a barrier of that CTA. Nobody may look at it before the phase
    /// is over, and nothing else that this thread has done is known by that.
    pub fn store_async<T: PtxStorable>(&mut self, to: PtxAddress, value: impl Into<PtxValue<T>>, barrier: PtxAddress) {
        let value = value.into();
        // The instruction stores registers only, so a constant is put into one first.
        let value = if value.is_register() { value } else { self.variable(value) };
        // The instruction is of PTX 8.1, above the version of the older targets' texts.
        self.version = self.version.max("8.1");
        self.write(&format!(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{} {to}, {value}, {barrier}",
            T::BITS
        ));
    }

    /// Waits until the phase of that parity, 0 of the first, is over on a barrier of this CTA: what was stored is there to see.
    pub fn wait_for_phase(&mut self, barrier: PtxAddress, parity: u32) {
        // A try may give up before the phase is over, so it is repeated.
        let start = self.new_label();
        self.label(&start);
        let wait = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64";
        let is_over: PtxValue<bool> = self.define(wait, &format!("{barrier}, {parity}"));
        self.write(&format!("@!{is_over} bra {start}"));
    }

    /// Waits until all that this thread copies is there, for this thread to see.
    pub fn wait_for_copies(&mut self) {
        self.write("cp.async.wait_all");
    }
}

fn list<T: PtxElement>(values: &[PtxValue<T>]) -> String {
    let values: Vec<String> = values.iter().map(PtxValue::to_string).collect();
    format!("{{{}}}", values.join(", "))
}

/// The position of a thread, and synchronisation with other threads.
impl PtxBuilder {
    /// Returns the number of the thread in its CTA.
    pub fn thread(&mut self) -> PtxValue<u32> {
        self.define("mov.u32", "%tid.x")
    }

    /// Returns the number of the CTA in the grid.
    pub fn cta(&mut self) -> PtxValue<u32> {
        self.define("mov.u32", "%ctaid.x")
    }

    /// Returns the number of the CTA in its cluster.
    pub fn rank(&mut self) -> PtxValue<u32> {
        self.define("mov.u32", "%cluster_ctarank")
    }

    /// Waits for all threads of the CTA.
    pub fn barrier(&mut self) {
        self.write("barrier.sync 0");
    }

    /// Arrives at the barrier of all threads of the cluster.
    pub fn arrive_at_cluster(&mut self, arrival: Arrival) {
        self.write(match arrival {
            Arrival::Release => "barrier.cluster.arrive.release",
            Arrival::Relaxed => "barrier.cluster.arrive.relaxed",
        });
    }

    /// Waits until all of them have arrived.
    pub fn wait_for_cluster(&mut self) {
        self.write("barrier.cluster.wait.acquire");
    }

    /// Returns the value of the lane whose number differs from this one's in `bits`. All 32 lanes of the warp must
    /// take part.
    pub fn exchange(&mut self, value: PtxValue<f32>, bits: u32) -> PtxValue<f32> {
        self.define("shfl.sync.bfly.b32", &format!("{value}, {bits}, 31, 0xffffffff"))
    }
}

/// Instructions that compute with numbers and truth values.
impl PtxBuilder {
    /// Returns `a + b`, rounded to nearest even.
    pub fn add<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(T::ADD, a, b.into())
    }

    /// Returns `a − b`, rounded to nearest even.
    pub fn sub<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(T::SUB, a, b.into())
    }

    /// Returns `a · b`, rounded to nearest even.
    pub fn mul<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(T::MUL, a, b.into())
    }

    /// `a · b + c`, rounded once.
    pub fn mul_add<T: PtxNumber>(
        &mut self,
        a: PtxValue<T>,
        b: impl Into<PtxValue<T>>,
        c: impl Into<PtxValue<T>>,
    ) -> PtxValue<T> {
        let (b, c) = (b.into(), c.into());
        self.define(T::MUL_ADD, &format!("{a}, {b}, {c}"))
    }

    /// The smaller; NaN if either is.
    pub fn min<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(T::MIN, a, b.into())
    }

    /// The larger; NaN if either is.
    pub fn max<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(T::MAX, a, b.into())
    }

    /// `a < b`; false where either is NaN
    pub fn less<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<bool> {
        self.binary(&format!("setp.lt.{}", T::NAME), a, b.into())
    }

    /// `a = b`; false where either is NaN
    pub fn equal<T: PtxNumber>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<bool> {
        self.binary(&format!("setp.eq.{}", T::NAME), a, b.into())
    }

    /// `a · b`, all 64 bits of it.
    pub fn mul_wide(&mut self, a: PtxValue<u32>, b: impl Into<PtxValue<u32>>) -> PtxValue<u64> {
        let b = b.into();
        self.define("mul.wide.u32", &format!("{a}, {b}"))
    }

    /// Returns the same number in 64 bits.
    pub fn extend(&mut self, a: PtxValue<u32>) -> PtxValue<u64> {
        self.define("cvt.u64.u32", &a.to_string())
    }

    /// Returns the lower 32 bits of `a`.
    pub fn truncate(&mut self, a: PtxValue<u64>) -> PtxValue<u32> {
        self.define("cvt.u32.u64", &a.to_string())
    }

    /// The bits that both have.
    pub fn bits_and<T: PtxInteger>(&mut self, a: PtxValue<T>, b: impl Into<PtxValue<T>>) -> PtxValue<T> {
        self.binary(&format!("and.{}", T::BITS), a, b.into())
    }

    /// Returns `a << bits`, with zeros from below.
    pub fn shift_left<T: PtxInteger>(&mut self, a: PtxValue<T>, bits: u32) -> PtxValue<T> {
        self.define(&format!("shl.{}", T::BITS), &format!("{a}, {bits}"))
    }

    /// `a >> bits`, zeros from above.
    pub fn shift_right<T: PtxInteger>(&mut self, a: PtxValue<T>, bits: u32) -> PtxValue<T> {
        self.define(&format!("shr.{}", T::NAME), &format!("{a}, {bits}"))
    }

    /// Returns `a >> bits` with copies of the sign bit from above.
    pub fn shift_right_signed(&mut self, a: PtxValue<u32>, bits: u32) -> PtxValue<u32> {
        self.define("shr.s32", &format!("{a}, {bits}"))
    }

    /// Returns `a ∧ b` of truth values.
    pub fn and(&mut self, a: PtxValue<bool>, b: PtxValue<bool>) -> PtxValue<bool> {
        self.binary("and.pred", a, b)
    }

    /// Returns `a ∨ b` of truth values.
    pub fn or(&mut self, a: PtxValue<bool>, b: PtxValue<bool>) -> PtxValue<bool> {
        self.binary("or.pred", a, b)
    }

    /// Returns `¬a` of a truth value.
    pub fn not(&mut self, a: PtxValue<bool>) -> PtxValue<bool> {
        self.define("not.pred", &a.to_string())
    }

    /// `yes` where `condition` holds, else `no`.
    pub fn select<T: PtxStorable>(
        &mut self,
        condition: PtxValue<bool>,
        yes: impl Into<PtxValue<T>>,
        no: impl Into<PtxValue<T>>,
    ) -> PtxValue<T> {
        let (yes, no) = (yes.into(), no.into());
        self.define(&format!("selp.{}", T::BITS), &format!("{yes}, {no}, {condition}"))
    }

    /// Returns `−a` of a real number.
    pub fn neg(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        self.define("neg.f32", &a.to_string())
    }

    /// `a / b`, rounded to nearest even.
    pub fn div(&mut self, a: PtxValue<f32>, b: PtxValue<f32>) -> PtxValue<f32> {
        self.binary("div.rn.f32", a, b)
    }

    /// `1 / a` within 1 ulp; what is below the normal numbers is 0.
    pub fn reciprocal(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        self.define("rcp.approx.ftz.f32", &a.to_string())
    }

    /// `2^a` within 2 ulp; what is below the normal numbers is 0.
    pub fn exp2(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        self.define("ex2.approx.ftz.f32", &a.to_string())
    }

    /// `a` to the nearest whole number, ties to even.
    pub fn round(&mut self, a: PtxValue<f32>) -> PtxValue<f32> {
        self.define("cvt.rni.f32.f32", &a.to_string())
    }

    /// A whole number with a sign as f32.
    pub fn float_from_signed(&mut self, a: PtxValue<u32>) -> PtxValue<f32> {
        self.define("cvt.rn.f32.s32", &a.to_string())
    }

    /// Returns the bit pattern of `a`.
    pub fn bits(&mut self, a: PtxValue<f32>) -> PtxValue<u32> {
        self.define("mov.b32", &a.to_string())
    }

    /// The f32 that has these bits.
    pub fn float_from_bits(&mut self, a: PtxValue<u32>) -> PtxValue<f32> {
        self.define("mov.b32", &a.to_string())
    }
}

/// Two f32 at once, each rounded as one alone: a single instruction where the target has it.
impl PtxBuilder {
    /// Returns `a + b` of both halves.
    pub fn add_pair(&mut self, a: [PtxValue<f32>; 2], b: [PtxValue<f32>; 2]) -> [PtxValue<f32>; 2] {
        self.pairwise("add.rn.f32x2", [a, b], |on, [a, b]| on.add(a, b))
    }

    /// Returns `a − b` of both halves.
    pub fn sub_pair(&mut self, a: [PtxValue<f32>; 2], b: [PtxValue<f32>; 2]) -> [PtxValue<f32>; 2] {
        self.pairwise("sub.rn.f32x2", [a, b], |on, [a, b]| on.sub(a, b))
    }

    /// Returns `a · b` of both halves.
    pub fn mul_pair(&mut self, a: [PtxValue<f32>; 2], b: [PtxValue<f32>; 2]) -> [PtxValue<f32>; 2] {
        self.pairwise("mul.rn.f32x2", [a, b], |on, [a, b]| on.mul(a, b))
    }

    /// `a · b + c`, rounded once.
    pub fn mul_add_pair(
        &mut self,
        a: [PtxValue<f32>; 2],
        b: [PtxValue<f32>; 2],
        c: [PtxValue<f32>; 2],
    ) -> [PtxValue<f32>; 2] {
        self.pairwise("fma.rn.f32x2", [a, b, c], |on, [a, b, c]| on.mul_add(a, b, c))
    }

    fn pairwise<const N: usize>(
        &mut self,
        both: &str,
        operands: [[PtxValue<f32>; 2]; N],
        each: impl Fn(&mut Self, [PtxValue<f32>; N]) -> PtxValue<f32>,
    ) -> [PtxValue<f32>; 2] {
        if self.target < PtxTarget::Sm100 {
            // Older targets compute the halves one by one, with the same rounding.
            return [0, 1].map(|half| each(self, operands.map(|operand| operand[half])));
        }
        // A pair of f32 is one register of 64 bits to the instruction, so both halves are packed before and unpacked
        // after.
        let operands: [PtxValue<u64>; N] = operands.map(|halves| self.define("mov.b64", &list(&halves)));
        let operands = operands.map(|operand| operand.to_string()).join(", ");
        let result: PtxValue<u64> = self.define(both, &operands);
        let halves = [self.new_register(), self.new_register()];
        self.write(&format!("mov.b64 {}, {result}", list(&halves)));
        halves
    }
}

/// Instructions on bf16 and f16.
impl PtxBuilder {
    /// Returns the larger value of each half; NaN if either is NaN.
    pub fn max_packed(&mut self, packed: PackedFloat, a: PtxValue<u32>, b: PtxValue<u32>) -> PtxValue<u32> {
        self.binary(&format!("max.NaN.{}x2", packed.name()), a, b)
    }

    /// Both halves in f32, the lower first.
    pub fn unpack(&mut self, packed: PackedFloat, a: PtxValue<u32>) -> [PtxValue<f32>; 2] {
        match packed {
            PackedFloat::Bf16 => {
                // A bf16 is the upper half of an f32: the low one is shifted up, and the high one is there already.
                let low = self.shift_left(a, 16);
                let high = self.bits_and(a, 0xFFFF_0000);
                [self.float_from_bits(low), self.float_from_bits(high)]
            }
            PackedFloat::F16 => {
                let (low, high): (PtxValue<u16>, PtxValue<u16>) = (self.new_register(), self.new_register());
                self.write(&format!("mov.b32 {{{low}, {high}}}, {a}"));
                [self.widen(packed, low), self.widen(packed, high)]
            }
        }
    }

    /// The other way round, each rounded to nearest even.
    pub fn pack(&mut self, packed: PackedFloat, low: PtxValue<f32>, high: PtxValue<f32>) -> PtxValue<u32> {
        // The instruction takes the upper half first.
        self.define(&format!("cvt.rn.{}x2.f32", packed.name()), &format!("{high}, {low}"))
    }

    /// One of them in f32.
    pub fn widen(&mut self, packed: PackedFloat, a: PtxValue<u16>) -> PtxValue<f32> {
        match packed {
            PackedFloat::Bf16 => {
                let bits = self.define("cvt.u32.u16", &a.to_string());
                let bits = self.shift_left(bits, 16);
                self.float_from_bits(bits)
            }
            PackedFloat::F16 => self.define("cvt.f32.f16", &a.to_string()),
        }
    }

    /// f32 rounded to nearest even.
    pub fn narrow(&mut self, packed: PackedFloat, a: PtxValue<f32>) -> PtxValue<u16> {
        self.define(&format!("cvt.rn.{}.f32", packed.name()), &a.to_string())
    }
}

/// Registers that change, and the way through the kernel.
impl PtxBuilder {
    /// A register of its own that holds `value`, to be [`set`](Self::set).
    pub fn variable<T: PtxStorable>(&mut self, value: impl Into<PtxValue<T>>) -> PtxValue<T> {
        let value = value.into();
        self.define(&format!("mov.{}", T::BITS), &value.to_string())
    }

    /// Puts `value` into a variable: what was named by it before is gone.
    pub fn set<T: PtxStorable>(&mut self, variable: PtxValue<T>, value: impl Into<PtxValue<T>>) {
        assert!(variable.is_register(), "{variable} is set, which is a constant");
        let value = value.into();
        self.write(&format!("mov.{} {variable}, {value}", T::BITS));
    }

    fn new_label(&mut self) -> String {
        self.labels += 1;
        format!("$L{}", self.labels)
    }

    fn label(&mut self, label: &str) {
        let _ = writeln!(self.body, "{label}:");
    }

    /// Runs `body` in the threads where `condition` holds.
    pub fn when(&mut self, condition: PtxValue<bool>, body: impl FnOnce(&mut Self)) {
        let end = self.new_label();
        // Threads for which the condition fails branch round the body; a warp whose threads differ runs it with some of
        // them idle.
        self.write(&format!("@!{condition} bra {end}"));
        body(self);
        self.label(&end);
    }

    /// Runs `yes` in the threads where `condition` holds, and `no` in the others.
    pub fn either(&mut self, condition: PtxValue<bool>, yes: impl FnOnce(&mut Self), no: impl FnOnce(&mut Self)) {
        let [otherwise, end] = [self.new_label(), self.new_label()];
        self.write(&format!("@!{condition} bra {otherwise}"));
        yes(self);
        self.write(&format!("bra {end}"));
        self.label(&otherwise);
        no(self);
        self.label(&end);
    }

    /// Runs `body` again while what it returns holds.
    pub fn repeat(&mut self, body: impl FnOnce(&mut Self) -> PtxValue<bool>) {
        let start = self.new_label();
        self.label(&start);
        let again = body(self);
        self.write(&format!("@{again} bra {start}"));
    }

    /// The end of this thread.
    pub fn exit(&mut self) {
        self.write("ret");
    }
}

/// The name of the array of dynamic shared memory.
const DYNAMIC: &str = "dynamic";
