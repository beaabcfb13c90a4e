//! The arithmetic that a per-token formula needs, over the values of a kernel: numbers, or names of values in a program that is
//! being written.

/// Arithmetic on one kind of value.
pub trait Arithmetic {
    /// A real number, or the name of one in a program.
    type Value: Copy;
    /// A truth value, the result of a comparison.
    type Truth: Copy;

    /// Returns the number `x`, rounded to the arithmetic's precision.
    fn constant(&mut self, x: f64) -> Self::Value;
    /// Adds two numbers: `a + b`, rounded once.
    fn add(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// Subtracts two numbers: `a − b`, rounded once.
    fn sub(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// Multiplies two numbers: `a · b`, rounded once.
    fn mul(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// Divides two numbers: `a / b`, rounded once.
    fn div(&mut self, a: Self::Value, b: Self::Value) -> Self::Value;
    /// Negates a number: `−a`, which is exact.
    fn neg(&mut self, a: Self::Value) -> Self::Value;
    /// Computes the exponential `e^a` of a number.
    fn exp(&mut self, a: Self::Value) -> Self::Value;
    /// `e^a − 1`, accurate near 0. With `u = e^a` rounded, `(u − 1) · a / ln u`; `a` itself where `u` is 1, `u − 1` where
    /// that is −1 or infinite.
    fn exp_m1(&mut self, a: Self::Value) -> Self::Value {
        let (zero, minus_one, infinite) = (self.constant(0.0), self.constant(-1.0), self.constant(f64::INFINITY));
        let u = self.exp(a);
        let d = self.add(u, minus_one);
        let log = self.ln(u);
        let correction = self.div(a, log);
        let product = self.mul(d, correction);
        let lost = self.equal(d, minus_one);
        let overflown = self.equal(d, infinite);
        let at_an_end = self.or(lost, overflown);
        let value = self.select(at_an_end, d, product);
        let nothing_left = self.equal(d, zero);
        self.select(nothing_left, a, value)
    }
    /// Computes the natural logarithm `ln a`.
    fn ln(&mut self, a: Self::Value) -> Self::Value;
    /// `ln (1 + a)`, accurate near 0. A few ulp from it everywhere: with `u = 1 + a` rounded, `ln u · a / (u − 1)`.
    fn ln_1p(&mut self, a: Self::Value) -> Self::Value {
        let (zero, one) = (self.constant(0.0), self.constant(1.0));
        let u = self.add(one, a);
        let d = self.sub(u, one);
        let log = self.ln(u);
        let correction = self.div(a, d);
        let product = self.mul(log, correction);
        let nothing_added = self.equal(d, zero);
        self.select(nothing_added, a, product)
    }
    /// `a < b`; false where either is NaN
    fn less(&mut self, a: Self::Value, b: Self::Value) -> Self::Truth;
    /// `a = b`; false where either is NaN
    fn equal(&mut self, a: Self::Value, b: Self::Value) -> Self::Truth;
    /// Combines two truth values: `a ∧ b`, both.
    fn and(&mut self, a: Self::Truth, b: Self::Truth) -> Self::Truth;
    /// Combines two truth values: `a ∨ b`, either or both.
    fn or(&mut self, a: Self::Truth, b: Self::Truth) -> Self::Truth;
    /// `a ≥ b`; false if either is NaN
    fn at_least(&mut self, a: Self::Value, b: Self::Value) -> Self::Truth {
        let (less, equal) = (self.less(b, a), self.equal(b, a));
        self.or(less, equal)
    }
    /// `a` held within `[least, most]`; a NaN stays
    fn clamp(&mut self, a: Self::Value, bounds: [f64; 2]) -> Self::Value {
        let [least, most] = bounds.map(|bound| self.constant(bound));
        let (below, above) = (self.less(a, least), self.less(most, a));
        let raised = self.select(below, least, a);
        self.select(above, most, raised)
    }
    /// `yes` where `condition` holds, else `no`
    fn select(&mut self, condition: Self::Truth, yes: Self::Value, no: Self::Value) -> Self::Value;
}

/// The arithmetic of f64 on this machine, computed at once.
pub struct Immediate;

impl Arithmetic for Immediate {
    type Value = f64;
    type Truth = bool;

    fn constant(&mut self, x: f64) -> f64 {
        x
    }
    fn add(&mut self, a: f64, b: f64) -> f64 {
        a + b
    }
    fn sub(&mut self, a: f64, b: f64) -> f64 {
        a - b
    }
    fn mul(&mut self, a: f64, b: f64) -> f64 {
        a * b
    }
    fn div(&mut self, a: f64, b: f64) -> f64 {
        a / b
    }
    fn neg(&mut self, a: f64) -> f64 {
        -a
    }
    fn exp(&mut self, a: f64) -> f64 {
        a.exp()
    }
    fn exp_m1(&mut self, a: f64) -> f64 {
        a.exp_m1()
    }
    fn ln(&mut self, a: f64) -> f64 {
        a.ln()
    }
    fn ln_1p(&mut self, a: f64) -> f64 {
        a.ln_1p()
    }
    fn less(&mut self, a: f64, b: f64) -> bool {
        a < b
    }
    fn equal(&mut self, a: f64, b: f64) -> bool {
        a == b
    }
    fn and(&mut self, a: bool, b: bool) -> bool {
        a && b
    }
    fn or(&mut self, a: bool, b: bool) -> bool {
        a || b
    }
    fn select(&mut self, condition: bool, yes: f64, no: f64) -> f64 {
        if condition { yes } else { no }
    }
}
