//! Coefficients of the quotient by which every kernel computes `tanh` in f32, on vector units and on devices alike.
//!
//! ```text
//! tanh(y)/y = P(y²)/Q(y²)   for |y| < FAR        P(s) = 1 + p₁s + p₂s² + p₃s³ + p₄s⁴,  Q likewise
//! ```
//!
//! The quotient is a minimax approximation (Lawson's algorithm), exact to `0.37u` of itself before the roundings of its evaluation.

/// Coefficients `p₁ … p₄` of the numerator `P`, whose constant term is 1.
pub const NUMERATOR: [f32; 4] = [0.133_833_35, 0.003_498_230_6, 0.000_020_648_526, 1.340_202_7e-8];
/// Coefficients `q₁ … q₄` of the denominator `Q`, whose constant term is 1.
pub const DENOMINATOR: [f32; 4] = [0.467_166_4, 0.025_887_314, 0.000_328_977_5, 7.797_520_4e-7];
/// Least magnitude whose `tanh` is ±1 in f32.
pub const FAR: f32 = 9.01;
