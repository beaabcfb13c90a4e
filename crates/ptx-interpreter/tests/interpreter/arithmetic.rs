//! What instructions compute, before arithmetic of 640 bits, before documented bounds, and by hand.

use assay_ptx_interpreter::{ApproximateUnits, GlobalArray, GridLaunch, InterpretOptions, PtxModule};
use astro_float::{BigFloat, RoundingMode};
use half::{bf16, f16};
use proptest::prelude::*;

/// An instruction's registers, by the letter before their number.
struct Form<'a> {
    /// On registers `%d`, `%a`, `%b`, `%c` and predicates `%p`, `%q`.
    instruction: &'a str,
    /// Types of `%d`, `%a`, `%b`, `%c`.
    types: [&'a str; 4],
}

fn bits(ty: &str) -> u32 {
    let digits: String = ty.chars().skip_while(char::is_ascii_alphabetic).take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

impl Form<'_> {
    /// `%d` of each of the operands, by `units`.
    fn by(&self, units: ApproximateUnits, operands: &[[u64; 3]]) -> Vec<u64> {
        let Form { instruction, types: [d, a, b, c] } = self;
        let load = |name: &str, ty: &str, at: u32| format!("ld.global.b{} %{name}, [%rd2 + {at}];", bits(ty));
        let text = format!(
            ".version 8.6
            .target sm_100
            .address_size 64
            .visible .entry one(.param .u64 in, .param .u64 out)
            {{
                .reg .pred %p, %q; .reg .{d} %d; .reg .{a} %a; .reg .{b} %b; .reg .{c} %c;
                .reg .b32 %r<3>; .reg .b64 %rd<6>;
                ld.param.u64 %rd0, [in]; ld.param.u64 %rd1, [out];
                mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 32, %r0;
                mul.wide.u32 %rd2, %r0, 24; add.u64 %rd2, %rd0, %rd2;
                mul.wide.u32 %rd3, %r0, 8; add.u64 %rd3, %rd1, %rd3;
                {} {} {}
                mov.b64 %rd4, 0; st.global.b64 [%rd3], %rd4; setp.eq.b64 %q, %rd4, 0;
                {instruction}
                st.global.b{} [%rd3], %d;
            }}",
            load("a", a, 0),
            load("b", b, 8),
            load("c", c, 16),
            bits(d)
        );
        let warps = operands.len().div_ceil(32);
        let mut bytes: Vec<u8> = operands.iter().flatten().flat_map(|x| x.to_le_bytes()).collect();
        bytes.resize(warps * 32 * 24, 0);
        let launch =
            GridLaunch { grid: [warps as u32, 1, 1], block: [32, 1, 1], cluster: [1, 1, 1], dynamic_shared: 0 };
        let buffers = vec![GlobalArray::input("in", bytes), GlobalArray::output("out", warps * 32 * 8)];
        let options = InterpretOptions { units, ..InterpretOptions::default() };
        let module = PtxModule::parse(&text).unwrap();
        let out = module.run("one", &launch, buffers, &[0, 1], &options).unwrap();
        let all = out[1].bytes.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
        all.take(operands.len()).collect()
    }
}

fn of(instruction: &str, types: [&str; 4], operands: &[[u64; 3]]) -> Vec<u64> {
    Form { instruction, types }.by(ApproximateUnits::Rounded, operands)
}

fn one(instruction: &str, types: [&str; 4], operands: [u64; 3]) -> u64 {
    of(instruction, types, &[operands])[0]
}

const F32: [&str; 4] = ["f32"; 4];
const B32: [&str; 4] = ["b32"; 4];
const B64: [&str; 4] = ["b64"; 4];

fn f(x: f32) -> u64 {
    x.to_bits().into()
}

/// Bits that hold all sums and products of f32 and narrower.
const EXACT: usize = 640;

fn big(x: f64) -> BigFloat {
    BigFloat::from_f64(x, EXACT)
}

/// A format of floats: its bits, the bits below the exponent, and its values.
#[derive(Clone, Copy, Debug)]
struct Format {
    name: &'static str,
    bits: u32,
    fraction: u32,
    value: fn(u64) -> f64,
}

const SINGLE: Format = Format { name: "f32", bits: 32, fraction: 23, value: |x| f32::from_bits(x as u32).into() };
const HALF: Format = Format { name: "f16", bits: 16, fraction: 10, value: |x| f16::from_bits(x as u16).to_f64() };
const BRAIN: Format = Format { name: "bf16", bits: 16, fraction: 7, value: |x| bf16::from_bits(x as u16).to_f64() };

impl Format {
    /// The value of bits without their sign; of those of infinity, what would come next if there were no largest.
    fn magnitude(self, bits: u64) -> BigFloat {
        let infinity = ((1 << (self.bits - 1 - self.fraction)) - 1) << self.fraction;
        if bits < infinity {
            return big((self.value)(bits));
        }
        let twice = (self.value)(infinity - (1 << self.fraction)) * 2.0;
        big(twice)
    }

    /// That `bits` are nearest to `exact`, ties to even.
    fn assert_nearest(self, bits: u64, exact: &BigFloat) {
        let sign = 1 << (self.bits - 1);
        let (negative, bits) = (bits & sign != 0, bits & !sign);
        assert!(exact.is_zero() || negative == exact.is_negative(), "the sign of {bits:x}");
        let error = |bits| self.magnitude(bits).sub(&exact.abs(), EXACT, RoundingMode::None).abs();
        let (own, even) = (error(bits), bits & 1 == 0);
        let infinity = ((1 << (self.bits - 1 - self.fraction)) - 1) << self.fraction;
        let neighbours = [bits.checked_sub(1), (bits < infinity).then_some(bits + 1)];
        for neighbour in neighbours.into_iter().flatten() {
            // Whatever lies beyond half of the last step is infinite.
            let order = own.cmp(&error(neighbour)).unwrap();
            let beyond = bits == infinity && exact.abs().cmp(&self.magnitude(infinity)).unwrap() > 0;
            assert!(order < 0 || (order == 0 && even) || beyond, "{bits:x}, and {neighbour:x} is nearer to {exact}");
        }
    }

    /// Bits of any number, of near ones more often.
    fn any(self) -> impl Strategy<Value = u64> {
        let infinity: u64 = ((1 << (self.bits - 1 - self.fraction)) - 1) << self.fraction;
        let one = (infinity / 2) >> self.fraction << self.fraction;
        let sign = 1_u64 << (self.bits - 1);
        let near = one - (12 << self.fraction)..one + (12 << self.fraction);
        let magnitude = prop_oneof![0..infinity, near.clone(), near, 0..4_u64 << self.fraction];
        (magnitude, prop::bool::ANY).prop_map(move |(x, negative)| if negative { x | sign } else { x })
    }
}

fn sum(a: &BigFloat, b: &BigFloat) -> BigFloat {
    a.add(b, EXACT, RoundingMode::None)
}

fn product(a: &BigFloat, b: &BigFloat) -> BigFloat {
    a.mul(b, EXACT, RoundingMode::None)
}

fn rounds_once(format: Format, triples: &[(u64, u64, u64)]) {
    let ty = format.name;
    let types = if format.bits == 32 { F32 } else { ["b16"; 4] };
    let operands: Vec<[u64; 3]> = triples.iter().map(|&(a, b, c)| [a, b, c]).collect();
    for (operation, instruction) in [
        ("add", format!("add.rn.{ty} %d, %a, %b;")),
        ("sub", format!("sub.rn.{ty} %d, %a, %b;")),
        ("mul", format!("mul.rn.{ty} %d, %a, %b;")),
        ("fma", format!("fma.rn.{ty} %d, %a, %b, %c;")),
    ] {
        for (bits, operands) in of(&instruction, types, &operands).into_iter().zip(&operands) {
            let [a, b, c] = operands.map(|x| big((format.value)(x)));
            let exact = match operation {
                "add" => sum(&a, &b),
                "sub" => sum(&a, &b.neg()),
                "mul" => product(&a, &b),
                _ => sum(&product(&a, &b), &c),
            };
            format.assert_nearest(bits, &exact);
        }
    }
}

proptest! {
    #![proptest_config(crate::config(4))]

    #[test]
    fn f32_rounds_once(triples in prop::collection::vec((SINGLE.any(), SINGLE.any(), SINGLE.any()), 256)) {
        rounds_once(SINGLE, &triples);
    }

    #[test]
    fn f16_rounds_once(triples in prop::collection::vec((HALF.any(), HALF.any(), HALF.any()), 256)) {
        rounds_once(HALF, &triples);
    }

    #[test]
    fn bf16_rounds_once(triples in prop::collection::vec((BRAIN.any(), BRAIN.any(), BRAIN.any()), 256)) {
        rounds_once(BRAIN, &triples);
    }

    #[test]
    fn narrowing_is_to_the_nearest_or_towards_zero(all in prop::collection::vec(SINGLE.any(), 512)) {
        let operands: Vec<[u64; 3]> = all.iter().map(|&x| [x, x, x]).collect();
        for format in [HALF, BRAIN] {
            let ty = format.name;
            let nearest = of(&format!("cvt.rn.{ty}.f32 %d, %a;"), ["b16", "f32", "f32", "f32"], &operands);
            let zero = of(&format!("cvt.rz.{ty}.f32 %d, %a;"), ["b16", "f32", "f32", "f32"], &operands);
            let back = of(&format!("{{ .reg .b16 %h; cvt.rn.{ty}.f32 %h, %a; cvt.f32.{ty} %d, %h; }}"), F32, &operands);
            let packed = of(&format!("cvt.rn.{ty}x2.f32 %d, %a, 0f3F800000;"), ["b32", "f32", "f32", "f32"], &operands);
            for (i, &x) in all.iter().enumerate() {
                let exact = (SINGLE.value)(x);
                format.assert_nearest(nearest[i], &big(exact));
                prop_assert_eq!(packed[i], nearest[i] << 16 | if format.fraction == 7 { 0x3F80 } else { 0x3C00 });
                prop_assert_eq!(f64::from(f32::from_bits(back[i] as u32)), (format.value)(nearest[i]));
                let (cut, next) = ((format.value)(zero[i]).abs(), (format.value)(zero[i] + 1).abs());
                prop_assert!(cut <= exact.abs() && exact.abs() < next, "{exact}: {cut}");
            }
        }
    }

    #[test]
    fn approximations_are_within_their_bounds(all in prop::collection::vec(SINGLE.any(), 512), b in SINGLE.any()) {
        let operands: Vec<[u64; 3]> = all.iter().map(|&x| [x, b, b]).collect();
        // Of each, what it is of two numbers, and its largest error: in ulps, or as a distance.
        let relative = |error: f64| move |_: f64, y: f64| error * y.abs();
        let table: [(&str, Exact, Result<u32, Most>); 8] = [
            ("ex2.approx.f32 %d, %a;", |a, _| a.exp2(), Ok(2)),
            ("lg2.approx.f32 %d, %a;", |a, _| a.log2(), Err(Box::new(|a, y| {
                2_f64.powi(-22) * if 0.5 < a && a < 2.0 { 1.0 } else { y.abs() }
            }))),
            ("rcp.approx.f32 %d, %a;", |a, _| 1.0 / a, Ok(1)),
            ("sqrt.approx.f32 %d, %a;", |a, _| a.sqrt(), Err(Box::new(relative(2_f64.powi(-23))))),
            ("rsqrt.approx.f32 %d, %a;", |a, _| 1.0 / a.sqrt(), Err(Box::new(relative(2_f64.powf(-22.9))))),
            ("tanh.approx.f32 %d, %a;", |a, _| a.tanh(), Err(Box::new(relative(2_f64.powi(-11))))),
            ("div.full.f32 %d, %a, %b;", |a, b| a / b, Ok(2)),
            ("div.rn.f32 %d, %a, %b;", |a, b| a / b, Ok(0)),
        ];
        for (instruction, exact, most) in table {
            let form = Form { instruction, types: F32 };
            let [near, above, below] = [ApproximateUnits::Rounded, ApproximateUnits::Above, ApproximateUnits::Below].map(|units| form.by(units, &operands));
            for (i, &x) in all.iter().enumerate() {
                let (a, b) = ((SINGLE.value)(x), (SINGLE.value)(b));
                let right = exact(a, b);
                let bits = [&near, &above, &below].map(|all| all[i] & 0x7FFF_FFFF);
                let [near, above, below] = [&near, &above, &below].map(|all| (SINGLE.value)(all[i]));
                if right.is_nan() {
                    prop_assert!(near.is_nan() && above.is_nan() && below.is_nan());
                    continue;
                }
                if right.abs() >= f64::from(f32::MAX) / 2.0 || near == 0.0 {
                    continue;
                }
                prop_assert!((near - right).abs() <= 0.5 * ulp(right) * 1.000_001, "{instruction} {a}, {b}: {near}");
                match &most {
                    Ok(ulps) => {
                        let moved = [u64::from(*ulps), bits[0].min(u64::from(*ulps))];
                        prop_assert_eq!([bits[1] - bits[0], bits[0] - bits[2]], moved, "{} {}", instruction, a);
                    }
                    Err(most) => {
                        let most = most(a, right);
                        for off in [(above - right) * right.signum(), (right - below) * right.signum()] {
                            // The result is rounded, never beyond.
                            let least = most - ulp(right.abs() + most);
                            prop_assert!(least <= off && off <= most, "{instruction} {a}: {off:e}, {most:e}");
                        }
                    }
                }
            }
        }
    }
}

type Exact = fn(f64, f64) -> f64;
type Most = Box<dyn Fn(f64, f64) -> f64>;

/// From a number of f32 to the next.
fn ulp(x: f64) -> f64 {
    let exponent = x.abs().log2().floor().max(-126.0);
    (exponent - 23.0).exp2()
}

#[test]
fn functions_at_their_ends_are_right() {
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let denormal = f32::from_bits(3);
    for (name, input, expected) in [
        ("ex2", -infinity, 0.0),
        ("ex2", -0.0, 1.0),
        ("ex2", infinity, infinity),
        ("ex2", 200.0, infinity),
        ("ex2", -140.0, 2_f32.powi(-140)),
        ("ex2", nan, nan),
        ("lg2", -infinity, nan),
        ("lg2", -1.0, nan),
        ("lg2", -0.0, -infinity),
        ("lg2", 0.0, -infinity),
        ("lg2", 1.0, 0.0),
        ("lg2", denormal, 3_f32.log2() - 149.0),
        ("lg2", infinity, infinity),
        ("rcp", -infinity, -0.0),
        ("rcp", -0.0, -infinity),
        ("rcp", denormal, infinity),
        ("rcp", infinity, 0.0),
        ("rsqrt", -1.0, nan),
        ("rsqrt", -0.0, -infinity),
        ("rsqrt", infinity, 0.0),
        ("sqrt", -1.0, nan),
        ("sqrt", -0.0, -0.0),
        ("tanh", -infinity, -1.0),
        ("tanh", infinity, 1.0),
    ] {
        let got = one(&format!("{name}.approx.f32 %d, %a;"), F32, [f(input), 0, 0]);
        let expected = if expected.is_nan() { 0x7FFF_FFFF } else { f(expected) };
        assert_eq!(got, expected, "{name} of {input}");
    }
    // Beyond 2^126 a divisor's reciprocal is 0.
    let by = |a: f32| one("div.approx.f32 %d, %a, %b;", F32, [f(a), f(2_f32.powi(127)), 0]);
    assert_eq!((by(-3.0), by(infinity)), (f(-0.0), 0x7FFF_FFFF));
    assert_eq!(one("div.full.f32 %d, %a, %b;", F32, [f(3.0), f(2_f32.powi(127)), 0]), f(3.0 * 2_f32.powi(-127)));
}

#[test]
fn subnormals_are_flushed_where_it_says_so() {
    let (small, least) = (f32::from_bits(0x8000_0003), f32::MIN_POSITIVE);
    for (instruction, operands, kept, flushed) in [
        ("add{} %d, %a, %b;", [small, 0.0, 0.0], small, 0.0),
        ("add{} %d, %a, %b;", [small, -0.0, 0.0], small, -0.0),
        ("mul{} %d, %a, %b;", [least, 0.5, 0.0], least / 2.0, 0.0),
        ("mul{} %d, %a, %b;", [-least, 0.5, 0.0], -least / 2.0, -0.0),
        ("fma.rn{} %d, %a, %b, %c;", [1.0, 1.0, small], 1.0, 1.0),
        ("fma.rn{} %d, %a, %b, %c;", [least, -1.0, least * 1.5], least / 2.0, 0.0),
        ("max{} %d, %a, %b;", [small, -1.0, 0.0], small, -0.0),
        ("neg{} %d, %a;", [small, 0.0, 0.0], -small, 0.0),
        ("abs{} %d, %a;", [small, 0.0, 0.0], -small, 0.0),
        ("ex2.approx{} %d, %a;", [-140.0, 0.0, 0.0], 2_f32.powi(-140), 0.0),
        ("lg2.approx{} %d, %a;", [-small, 0.0, 0.0], 3_f32.log2() - 149.0, f32::NEG_INFINITY),
        ("rcp.approx{} %d, %a;", [2_f32.powi(127), 0.0, 0.0], 2_f32.powi(-127), 0.0),
        ("div.rn{} %d, %a, %b;", [least, 2.0, 0.0], least / 2.0, 0.0),
    ] {
        let run = |modifier: &str| one(&instruction.replace("{}", modifier), F32, operands.map(f));
        assert_eq!((run(".f32"), run(".ftz.f32")), (f(kept), f(flushed)), "{instruction} {operands:?}");
    }
}

#[test]
fn rounding_ties_are_broken_by_less_than_any_last_bit() {
    // 17 × 19 = 323 is midway between 322 and 324, of which 324 is even.
    let [seventeen, nineteen] = [17.0, 19.0].map(|x| u64::from(bf16::from_f32(x).to_bits()));
    for (c, expected) in
        [(0.0, 324.0), (2_f32.powi(-50), 324.0), (-(2_f32.powi(-50)), 322.0), (-(2_f32.powi(-40)), 322.0)]
    {
        let c = bf16::from_f32(c).to_bits().into();
        let got = one("fma.rn.bf16 %d, %a, %b, %c;", ["b16"; 4], [seventeen, nineteen, c]);
        assert_eq!(bf16::from_bits(got as u16).to_f32(), expected);
    }
}

#[test]
fn minimum_maximum_and_signs_are_right() {
    let nan = 0xFFC0_0001;
    for (instruction, [a, b], expected) in [
        ("max.f32", [f(1.0), nan], f(1.0)),
        ("max.f32", [nan, f(1.0)], f(1.0)),
        ("max.f32", [nan, nan], 0x7FFF_FFFF),
        ("max.NaN.f32", [nan, f(1.0)], 0x7FFF_FFFF),
        ("max.f32", [f(-0.0), f(0.0)], f(0.0)),
        ("max.f32", [f(0.0), f(-0.0)], f(0.0)),
        ("min.f32", [f(0.0), f(-0.0)], f(-0.0)),
        ("min.f32", [f(-0.0), f(0.0)], f(-0.0)),
        ("min.f32", [f(2.0), f(-3.0)], f(-3.0)),
        ("min.NaN.f32", [f(1.0), nan], 0x7FFF_FFFF),
        ("copysign.f32", [f(-1.0), f(3.0)], f(-3.0)),
        ("add.sat.f32", [f(1.0), f(3.0)], f(1.0)),
        ("add.sat.f32", [f(1.0), f(-3.0)], 0),
        ("mul.sat.f32", [nan, f(0.5)], 0),
        ("mul.sat.f32", [f(0.5), f(0.5)], f(0.25)),
    ] {
        assert_eq!(one(&format!("{instruction} %d, %a, %b;"), F32, [a, b, 0]), expected, "{instruction} {a:x} {b:x}");
    }
    // Two at once, each by itself: 1 and NaN with −2 and 3.
    let two = |instruction: &str, a, b| one(&format!("{instruction} %d, %a, %b;"), B32, [a, b, 0]);
    assert_eq!(two("max.bf16x2", 0x3F80_7FC0, 0xC000_4040), 0x3F80_4040);
    assert_eq!(two("max.NaN.bf16x2", 0x3F80_7FC0, 0xC000_4040), 0x3F80_7FFF);
    assert_eq!(two("min.bf16x2", 0x3F80_7FC0, 0xC000_4040), 0xC000_4040);
    assert_eq!(two("max.f16x2", 0x3C00_7E00, 0xC000_4200), 0x3C00_4200);
    assert_eq!(one("neg.bf16x2 %d, %a;", B32, [0x3F80_C000, 0, 0]), 0xBF80_4000);
    assert_eq!(one("abs.f16x2 %d, %a;", B32, [0xBC00_C000, 0, 0]), 0x3C00_4000);
    assert_eq!(one("fma.rn.bf16x2 %d, %a, %b, %c;", B32, [0x3F80_4000, 0x4000_4000, 0x3F80_0000]), 0x4040_4080);
    let pair = |upper: f32, lower: f32| f(upper) << 32 | f(lower);
    let operands = [pair(1.5, -2.0), pair(2.0, 3.0), pair(1.0, 0.5)];
    assert_eq!(one("fma.rn.f32x2 %d, %a, %b, %c;", B64, operands), pair(4.0, -5.5));
    assert_eq!(one("add.rn.ftz.f32x2 %d, %a, %b;", B64, operands), pair(3.5, 1.0));
    assert_eq!(one("sub.rn.f32x2 %d, %a, %b;", B64, operands), pair(-0.5, -5.0));
    assert_eq!(one("mul.rn.f32x2 %d, %a, %b;", B64, operands), pair(3.0, -6.0));
    // Each is rounded once, to even: 2²⁴ + 1, and the product of 1 + 2⁻¹² and itself less 1.
    let (large, near_one) = (pair(16_777_216.0, 1.0), pair(1.0, 1.0 + 1.0 / 4096.0));
    assert_eq!(one("add.rn.f32x2 %d, %a, %b;", B64, [large, pair(1.0, 2.0), 0]), pair(16_777_216.0, 3.0));
    let fused = one("fma.rn.f32x2 %d, %a, %b, %c;", B64, [near_one, near_one, pair(0.0, -1.0)]);
    assert_eq!(fused, pair(1.0, 2.0 / 4096.0 + 1.0 / 16_777_216.0));
}

#[test]
fn conversions_round_and_saturate() {
    for (instruction, to, from, x, expected) in [
        // Ties of bf16 and f16 go to even.
        ("cvt.rn.bf16.f32", "b16", "f32", 0x3F80_8000, 0x3F80),
        ("cvt.rn.bf16.f32", "b16", "f32", 0x3F81_8000, 0x3F82),
        ("cvt.rn.bf16.f32", "b16", "f32", 0x3F80_8001, 0x3F81),
        ("cvt.rz.bf16.f32", "b16", "f32", 0x3F80_FFFF, 0x3F80),
        ("cvt.rn.bf16.f32", "b16", "f32", 0x7F7F_FFFF, 0x7F80),
        ("cvt.rz.bf16.f32", "b16", "f32", 0x7F7F_FFFF, 0x7F7F),
        ("cvt.rn.bf16.f32", "b16", "f32", 0x7F80_0001, 0x7FFF),
        ("cvt.rn.f16.f32", "b16", "f32", 0x477F_F000, 0x7C00),
        ("cvt.rn.f16.f32", "b16", "f32", 0x3380_0000, 0x0001),
        ("cvt.f32.bf16", "f32", "b16", 0xC040, 0xC040_0000),
        ("cvt.f32.f16", "f32", "b16", 0x0001, 0x3380_0000),
        // To whole numbers, clamped.
        ("cvt.rni.s32.f32", "b32", "f32", 0x4020_0000, 2),
        ("cvt.rzi.s32.f32", "b32", "f32", 0xC02C_CCCD, 0xFFFF_FFFE),
        ("cvt.rmi.s32.f32", "b32", "f32", 0xC02C_CCCD, 0xFFFF_FFFD),
        ("cvt.rpi.s32.f32", "b32", "f32", 0x4020_0000, 3),
        ("cvt.rzi.u32.f32", "b32", "f32", 0xBF80_0000, 0),
        ("cvt.rzi.s32.f32", "b32", "f32", 0x4F80_0000, 0x7FFF_FFFF),
        ("cvt.rzi.s32.f32", "b32", "f32", 0x7FC0_0000, 0),
        ("cvt.rni.f32.f32", "f32", "f32", 0x4020_0000, 0x4000_0000),
        ("cvt.rmi.f32.f32", "f32", "f32", 0xBF00_0000, 0xBF80_0000),
        ("cvt.sat.f32.f32", "f32", "f32", 0x4000_0000, 0x3F80_0000),
        ("cvt.ftz.f32.f32", "f32", "f32", 0x8000_0001, 0x8000_0000),
        // From whole numbers.
        ("cvt.rn.f32.s32", "f32", "b32", 0xFFFF_FFFF, 0xBF80_0000),
        ("cvt.rn.f32.u32", "f32", "b32", 0x0100_0001, 0x4B80_0000),
        ("cvt.rn.f32.u32", "f32", "b32", 0xFFFF_FFFF, 0x4F80_0000),
        ("cvt.rz.f32.u32", "f32", "b32", 0xFFFF_FFFF, 0x4F7F_FFFF),
        ("cvt.rn.f32.u64", "f32", "b64", (1 << 40) + (1 << 16) + 1, 0x5380_0001),
        ("cvt.rn.f32.s64", "f32", "b64", u64::MAX, 0xBF80_0000),
        // Between whole numbers.
        ("cvt.u64.u32", "b64", "b32", 0xFFFF_FFFF, 0xFFFF_FFFF),
        ("cvt.s64.s32", "b64", "b32", 0xFFFF_FFFF, u64::MAX),
        ("cvt.u32.u16", "b32", "b16", 0x8000, 0x8000),
        ("cvt.s32.s8", "b32", "b32", 0x80, 0xFFFF_FF80),
        ("cvt.s16.s8", "b32", "b32", 0x80, 0xFFFF_FF80),
        ("cvt.u32.u64", "b32", "b64", 0x1_2345_6789, 0x2345_6789),
        ("cvt.sat.u8.s32", "b32", "b32", 300, 255),
        ("cvt.sat.s8.s32", "b32", "b32", 0xFFFF_0000, 0xFFFF_FF80),
    ] {
        let got = one(&format!("{instruction} %d, %a;"), [to, from, "b32", "b32"], [x, 0, 0]);
        assert_eq!(got, expected, "{instruction} of {x:x}: {got:x}");
    }
}

#[test]
fn integer_operations_are_right() {
    let minus = |x: u64| x.wrapping_neg() & 0xFFFF_FFFF;
    for (instruction, types, operands, expected) in [
        ("add.u32 %d, %a, %b;", B32, [0xFFFF_FFFF, 2, 0], 1),
        ("sub.s32 %d, %a, %b;", B32, [1, 3, 0], minus(2)),
        ("mul.lo.s32 %d, %a, %b;", B32, [minus(3), 5, 0], minus(15)),
        ("mul.hi.u32 %d, %a, %b;", B32, [0xFFFF_FFFF, 0xFFFF_FFFF, 0], 0xFFFF_FFFE),
        ("mul.hi.s32 %d, %a, %b;", B32, [minus(1), 5, 0], minus(1)),
        ("mul.wide.u32 %d, %a, %b;", ["b64", "b32", "b32", "b32"], [0xFFFF_FFFF, 3, 0], 0x2_FFFF_FFFD),
        ("mul.wide.s32 %d, %a, %b;", ["b64", "b32", "b32", "b32"], [minus(2), 3, 0], 6_u64.wrapping_neg()),
        ("mad.wide.u32 %d, %a, %b, %c;", ["b64", "b32", "b32", "b64"], [1 << 31, 4, 5], (2 << 32) + 5),
        ("mad.lo.u32 %d, %a, %b, %c;", B32, [7, 8, minus(6)], 50),
        ("mul.hi.u64 %d, %a, %b;", B64, [u64::MAX, u64::MAX, 0], u64::MAX - 1),
        ("mul.lo.u64 %d, %a, %b;", B64, [1 << 33, 1 << 31, 0], 0),
        ("div.s32 %d, %a, %b;", B32, [minus(7), 2, 0], minus(3)),
        ("rem.s32 %d, %a, %b;", B32, [minus(7), 2, 0], minus(1)),
        ("div.u32 %d, %a, %b;", B32, [7, 0, 0], 0xFFFF_FFFF),
        ("min.s32 %d, %a, %b;", B32, [minus(7), 2, 0], minus(7)),
        ("min.u32 %d, %a, %b;", B32, [minus(7), 2, 0], 2),
        ("max.s16 %d, %a, %b;", ["b16"; 4], [0x8000, 2, 0], 2),
        ("neg.s32 %d, %a;", B32, [5, 0, 0], minus(5)),
        ("abs.s32 %d, %a;", B32, [minus(5), 0, 0], 5),
        ("and.b32 %d, %a, %b;", B32, [0xC, 0xA, 0], 0x8),
        ("or.b32 %d, %a, %b;", B32, [0xC, 0xA, 0], 0xE),
        ("xor.b64 %d, %a, %b;", B64, [0xC, 0xA, 0], 0x6),
        ("not.b16 %d, %a;", ["b16"; 4], [0xC, 0, 0], 0xFFF3),
        ("shl.b32 %d, %a, %b;", B32, [0xFFFF_FFFF, 31, 0], 1 << 31),
        ("shl.b32 %d, %a, %b;", B32, [1, 32, 0], 0),
        ("shr.u32 %d, %a, %b;", B32, [1 << 31, 31, 0], 1),
        ("shr.u32 %d, %a, %b;", B32, [1 << 31, 32, 0], 0),
        ("shr.s32 %d, %a, %b;", B32, [1 << 31, 40, 0], 0xFFFF_FFFF),
        ("shr.b64 %d, %a, %b;", ["b64", "b64", "b32", "b32"], [1 << 63, 63, 0], 1),
        ("shf.l.wrap.b32 %d, %a, %b, %c;", B32, [0x8000_0001, 0x1, 33], 3),
        ("shf.r.clamp.b32 %d, %a, %b, %c;", B32, [0x8000_0001, 0x1, 33], 1),
        ("shf.r.wrap.b32 %d, %a, %b, %c;", B32, [0x8000_0002, 0x1, 1], 0xC000_0001),
        ("bfe.u32 %d, %a, %b, %c;", B32, [0xABCD, 4, 8], 0xBC),
        ("bfe.s32 %d, %a, %b, %c;", B32, [0xABCD, 4, 8], 0xFFFF_FFBC),
        ("bfe.s32 %d, %a, %b, %c;", B32, [1 << 31, 24, 40], 0xFFFF_FF80),
        ("bfe.u32 %d, %a, %b, %c;", B32, [0xABCD, 4, 0], 0),
        ("bfi.b32 %d, %a, %b, 4, 8;", B32, [0xFFF, 0xA000_000A, 0], 0xA000_0FFA),
        ("prmt.b32 %d, %a, %b, %c;", B32, [0x3322_1100, 0x7766_5544, 0x7610], 0x7766_1100),
        ("prmt.b32 %d, %a, %b, 0x5432;", B32, [0x3322_1100, 0x7766_5544, 0], 0x5544_3322),
        ("prmt.b32 %d, %a, %b, 0x000B;", B32, [0x8322_1100, 0, 0], 0xFF),
        ("lop3.b32 %d, %a, %b, %c, 0xEA;", B32, [0xC, 0xA, 0x1], 0x9),
        ("lop3.b32 %d, %a, %b, %c, 0x96;", B32, [0xC, 0xA, 0x1], 0x7),
        ("popc.b32 %d, %a;", B32, [0xF0F, 0, 0], 8),
        ("clz.b32 %d, %a;", B32, [1, 0, 0], 31),
        ("brev.b32 %d, %a;", B32, [1, 0, 0], 1 << 31),
        ("mov.b32 %d, {%a, %b};", ["b32", "b16", "b16", "b16"], [0x1234, 0x5678, 0], 0x5678_1234),
        ("{ .reg .b16 %h<2>; mov.b32 {%h0, %h1}, %a; mov.b32 %d, {%h1, %h0}; }", B32, [0x1234_5678, 0, 0], 0x5678_1234),
        (
            "{ .reg .b32 %w; mov.b64 {_, %w}, %a; mov.b64 %d, {%w, 0}; }",
            B64,
            [0x1234_5678_9ABC_DEF0, 0, 0],
            0x1234_5678,
        ),
        ("selp.b32 %d, %a, %b, %q;", B32, [1, 2, 0], 1),
        ("mov.b32 %d, -1;", B32, [0, 0, 0], 0xFFFF_FFFF),
        ("mov.b32 %d, 0b101;", B32, [0, 0, 0], 5),
        ("mov.f32 %d, 1.5;", F32, [0, 0, 0], 0x3FC0_0000),
        ("mov.f32 %d, -2.5e-1;", F32, [0, 0, 0], 0xBE80_0000),
        ("mov.f32 %d, 0fFF800000;", F32, [0, 0, 0], 0xFF80_0000),
    ] {
        let got = one(instruction, types, operands);
        assert_eq!(got, expected, "{instruction} of {operands:x?}: {got:x}");
    }
}

#[test]
fn comparisons_follow_their_types_and_nan() {
    let nan = 0x7FC0_0000;
    let set = |form: &str| format!("setp.{form}; selp.b32 %d, 1, 0, %p;");
    for (form, types, operands, expected) in [
        ("eq.f32 %p, %a, %b", F32, [f(0.0), f(-0.0)], 1),
        ("lt.f32 %p, %a, %b", F32, [f(1.0), nan], 0),
        ("ltu.f32 %p, %a, %b", F32, [f(1.0), nan], 1),
        ("ne.f32 %p, %a, %b", F32, [f(1.0), nan], 0),
        ("neu.f32 %p, %a, %b", F32, [f(1.0), nan], 1),
        ("geu.f32 %p, %a, %b", F32, [f(1.0), f(2.0)], 0),
        ("num.f32 %p, %a, %b", F32, [f(1.0), f(2.0)], 1),
        ("num.f32 %p, %a, %b", F32, [f(1.0), nan], 0),
        ("nan.f32 %p, %a, %b", F32, [f(1.0), nan], 1),
        ("nan.f32 %p, %a, %b", F32, [f(1.0), f(2.0)], 0),
        ("gt.ftz.f32 %p, %a, %b", F32, [3, 2], 0),
        ("gt.f32 %p, %a, %b", F32, [3, 2], 1),
        ("lt.s32 %p, %a, %b", B32, [0xFFFF_FFFF, 0], 1),
        ("lt.u32 %p, %a, %b", B32, [0xFFFF_FFFF, 0], 0),
        ("hs.u32 %p, %a, %b", B32, [0xFFFF_FFFF, 0], 1),
        ("le.u64 %p, %a, %b", B64, [1 << 40, 1 << 40], 1),
        ("lt.bf16 %p, %a, %b", ["b16"; 4], [0xBF80, 0x3F80], 1),
        ("gt.f16 %p, %a, %b", ["b16"; 4], [0xBC00, 0x3C00], 0),
        ("eq.and.u32 %p, %a, %b, %q", B32, [1, 1], 1),
        ("eq.and.u32 %p, %a, %b, !%q", B32, [1, 1], 0),
        ("eq.xor.u32 %p, %a, %b, %q", B32, [1, 1], 0),
        ("eq.or.u32 _|%p, %a, %b, !%q", B32, [1, 1], 0),
    ] {
        let types = ["b32", types[1], types[2], types[3]];
        assert_eq!(one(&set(form), types, [operands[0], operands[1], 0]), expected, "{form} of {operands:x?}");
    }
    for (test, x, expected) in [
        ("finite", 1, 1),
        ("finite", nan, 0),
        ("infinite", 0xFF80_0000, 1),
        ("number", nan, 0),
        ("notanumber", nan, 1),
        ("normal", 1, 0),
        ("subnormal", 0x8000_0001, 1),
    ] {
        let form = format!("testp.{test}.f32 %p, %a; selp.b32 %d, 1, 0, %p;");
        assert_eq!(one(&form, ["b32", "f32", "f32", "f32"], [x, 0, 0]), expected, "{test} of {x:x}");
    }
}

#[test]
fn shuffles_votes_and_reductions_are_right() {
    let lanes: Vec<[u64; 3]> = (0..32).map(|lane| [lane, lane * lane, 0]).collect();
    let run = |instruction: &str| of(instruction, B32, &lanes);
    let expected = |value: &dyn Fn(u64) -> u64| (0..32).map(value).collect::<Vec<_>>();
    for (form, value) in [
        ("shfl.sync.bfly.b32 %d, %a, 5, 31, -1;", &(|i: u64| i ^ 0x5) as &dyn Fn(u64) -> u64),
        ("shfl.sync.idx.b32 %d, %a, 7, 31, -1;", &|_| 7),
        ("shfl.sync.up.b32 %d, %a, 3, 0, -1;", &|i| if i < 3 { i } else { i - 3 }),
        ("shfl.sync.down.b32 %d, %a, 3, 31, -1;", &|i| if i + 3 > 31 { i } else { i + 3 }),
        // Within parts of 8.
        ("shfl.sync.down.b32 %d, %a, 3, 0x181F, -1;", &|i| if i % 8 + 3 > 7 { i } else { i + 3 }),
        ("shfl.sync.idx.b32 %d, %a, 9, 0x181F, -1;", &|i| i / 8 * 8 + 1),
        ("shfl.sync.up.b32 %d|%p, %a, 1, 0, -1; selp.b32 %d, 1, 0, %p;", &|i| u64::from(i > 0)),
        ("setp.lt.u32 %p, %a, 3; vote.sync.ballot.b32 %d, %p, -1;", &|_| 7),
        ("setp.lt.u32 %p, %a, 3; vote.sync.ballot.b32 %d, !%p, -1;", &|_| 0xFFFF_FFF8),
        ("setp.lt.u32 %p, %a, 3; vote.sync.any.pred %p, %p, -1; selp.b32 %d, 1, 0, %p;", &|_| 1),
        ("setp.lt.u32 %p, %a, 3; vote.sync.all.pred %p, %p, -1; selp.b32 %d, 1, 0, %p;", &|_| 0),
        ("setp.lt.u32 %p, %a, 3; vote.sync.uni.pred %p, %p, -1; selp.b32 %d, 1, 0, %p;", &|_| 0),
        ("redux.sync.add.u32 %d, %a, -1;", &|_| 496),
        ("redux.sync.max.s32 %d, %b, -1;", &|_| 961),
        ("redux.sync.min.u32 %d, %b, -1;", &|_| 0),
        ("redux.sync.xor.b32 %d, %a, -1;", &|_| 0),
        ("redux.sync.or.b32 %d, %a, -1;", &|_| 31),
        ("elect.sync _|%p, -1; selp.b32 %d, 1, 0, %p;", &|i| u64::from(i == 0)),
        ("activemask.b32 %d;", &|_| 0xFFFF_FFFF),
        ("mov.u32 %d, %lanemask_lt;", &|i| (1 << i) - 1),
        ("mov.u32 %d, %laneid;", &|i| i),
    ] {
        assert_eq!(run(form), expected(value), "{form}");
    }
}
