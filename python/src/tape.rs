//! A loss between the logits and their gradient, written down as a list of operations on `[B,T]` arrays, for a framework to
//! compute: what [`assay_algebra`] has, which the kernels compute too.
//!
//! ```text
//! softmax   statistics of a row ─▶ logp, entropy, and what its gradient is made of
//! loss      logp, arrays of the batch, weights ─▶ the loss of each token, what is logged of it, ∂loss/∂logp
//! ```

use pyo3::prelude::*;
use serde::Serialize;

use crate::error;
use crate::spec::Spec;
use assay::problem::ProblemError;
use assay::spec::{Averaging, LossSpec, RatioLevel, Reduction, Rows};
use assay_algebra::arithmetic::Arithmetic;
use assay_algebra::family::{Reach, expect_one_id, expect_plain_logits};
use assay_algebra::objective::{Token, own_log_ratio, sum, token_loss, unless};
use assay_algebra::softmax::Sums;
use assay_algebra::structure::{Denominator, Input, Number, Numbers, Shaped, Structure, Temperature, Tokens};
use assay_algebra::transform;

/// One operation: its name, and the places of its operands in the list, or the text of a constant or of an input's name.
#[derive(Serialize)]
#[serde(untagged)]
enum Operation {
    Leaf(&'static str, String),
    Of(&'static str, Vec<usize>),
}

/// The operations so far. Each value is the place of one.
#[derive(Default, Serialize)]
struct Tape {
    operations: Vec<Operation>,
    outputs: Vec<(&'static str, usize)>,
}

impl Tape {
    fn push(&mut self, operation: Operation) -> usize {
        self.operations.push(operation);
        self.operations.len() - 1
    }

    fn of<const N: usize>(&mut self, name: &'static str, operands: [usize; N]) -> usize {
        self.push(Operation::Of(name, operands.to_vec()))
    }

    fn input(&mut self, name: &str) -> usize {
        self.push(Operation::Leaf("input", name.into()))
    }

    /// The sum over the unmasked tokens of each row, in the places of all its tokens.
    fn row_sum(&mut self, value: usize) -> usize {
        self.of("row_sum", [value])
    }

    fn output(&mut self, name: &'static str, value: usize) {
        self.outputs.push((name, value));
    }
}

impl Arithmetic for Tape {
    type Value = usize;
    type Truth = usize;

    fn constant(&mut self, x: f64) -> usize {
        self.push(Operation::Leaf("constant", x.to_string()))
    }
    fn add(&mut self, a: usize, b: usize) -> usize {
        self.of("add", [a, b])
    }
    fn sub(&mut self, a: usize, b: usize) -> usize {
        self.of("sub", [a, b])
    }
    fn mul(&mut self, a: usize, b: usize) -> usize {
        self.of("mul", [a, b])
    }
    fn div(&mut self, a: usize, b: usize) -> usize {
        self.of("div", [a, b])
    }
    fn neg(&mut self, a: usize) -> usize {
        self.of("neg", [a])
    }
    fn exp(&mut self, a: usize) -> usize {
        self.of("exp", [a])
    }
    fn exp_m1(&mut self, a: usize) -> usize {
        self.of("exp_m1", [a])
    }
    fn ln(&mut self, a: usize) -> usize {
        self.of("ln", [a])
    }
    fn ln_1p(&mut self, a: usize) -> usize {
        self.of("ln_1p", [a])
    }
    fn less(&mut self, a: usize, b: usize) -> usize {
        self.of("less", [a, b])
    }
    fn equal(&mut self, a: usize, b: usize) -> usize {
        self.of("equal", [a, b])
    }
    fn and(&mut self, a: usize, b: usize) -> usize {
        self.of("and", [a, b])
    }
    fn or(&mut self, a: usize, b: usize) -> usize {
        self.of("or", [a, b])
    }
    fn select(&mut self, condition: usize, yes: usize, no: usize) -> usize {
        self.of("select", [condition, yes, no])
    }
}

/// What a term of the loss is divided by, as [`Denominator`] has it.
#[derive(Serialize)]
struct Divisor {
    /// `batch`, `row` or nothing.
    tokens: Option<&'static str>,
    /// `all`, `filled` or nothing.
    rows: Option<&'static str>,
    /// The factors that are known whatever the batch.
    number: f64,
    epsilon: f64,
}

/// Everything that a framework needs of a spec to compute its loss around kernels.
#[derive(Serialize)]
pub(crate) struct Plan {
    /// `1/T` of the softmax that entropy is of; none where each token has its own, the input `rate`.
    inverse_temperature: Option<f64>,
    /// That of logp, where it is another.
    logp_inverse_temperature: f64,
    /// What `1/T` of a token is multiplied by to be its `rate`.
    rate: f64,
    /// Whether logp is of another softmax than entropy.
    two_softmaxes: bool,
    /// Whether tokens of a row depend on each other.
    couples_rows: bool,
    /// The arrays that are read beside ids, mask and advantages, in order.
    inputs: Vec<&'static str>,
    has_kl: bool,
    policy: Divisor,
    /// Where the KL penalty has a reduction of its own.
    kl: Option<Divisor>,
    /// Where there is an entropy bonus.
    entropy: Option<Divisor>,
    entropy_coef: f64,
    softmax: Tape,
    loss: Tape,
}

/// What the arithmetic is around.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Around {
    /// Kernels that take logits as they come.
    Plain,
    /// Kernels that change logits as the spec says: between statistics and dlogits their rate is a part of `1/T`.
    Native,
    /// The same, whose numbers are f32: the arithmetic in f64 between them has these.
    Device,
}

/// The plan of `spec` for a batch that is padded to `width`, or packed where there is none, as JSON, around kernels that are `native`, or
/// take logits as they come.
///
/// # Errors
/// Where the spec has what is decided over more than a row, a mean over a width that there is not, or changes logits before their
/// softmax and the kernels do not.
#[pyfunction]
#[pyo3(signature = (spec, width, native))]
pub(crate) fn plan(py: Python<'_>, spec: &Spec, width: Option<usize>, native: bool) -> PyResult<String> {
    let around = if native { Around::Native } else { Around::Plain };
    let plan = Plan::of(py, &spec.loss, width, around)?;
    Ok(serde_json::to_string(&plan).expect("plain data has a JSON form"))
}

impl Plan {
    /// That of `spec` for a batch that is padded to `width`, or packed where there is none.
    ///
    /// # Errors
    /// As [`plan`].
    pub(crate) fn of(py: Python<'_>, spec: &LossSpec, width: Option<usize>, around: Around) -> PyResult<Self> {
        if width.is_none() {
            let no_width = |field| error::of_spec(py, ProblemError::NoWidth { field });
            spec.expect_no_width().map_err(no_width)?;
        }
        let extents = [1, width.unwrap_or(1)];
        let plain = || if around == Around::Plain { expect_plain_logits(spec) } else { Ok(()) };
        expect_one_id(spec).and_then(|()| Reach::Row.expect(spec)).and_then(|()| plain()).map_err(|beyond| {
            let elsewhere = if matches!(beyond.field, "logits" | "support") { "; `native` takes it" } else { "" };
            error::of_spec(
                py,
                format!("`{}`: got {}, expected {}{elsewhere}", beyond.field, beyond.given, beyond.supported),
            )
        })?;
        let loss @ Shaped { structure, .. } = Shaped::of(spec);
        let number = |number: Number| number.of(spec, extents);
        let of_kernels = |which: Number| match around {
            Around::Device => f64::from(number(which) as f32),
            Around::Plain | Around::Native => number(which),
        };
        let divisor = |denominator: Denominator, averaging: Option<Averaging>, known, epsilon| Divisor {
            tokens: denominator.tokens.map(|tokens| match tokens {
                Tokens::OfBatch => "batch",
                Tokens::OfRow => "row",
            }),
            rows: averaging.and_then(|averaging| rows(averaging.reduction)),
            number: number(known),
            epsilon: if denominator.epsilon { number(epsilon) } else { 0.0 },
        };
        let kl = structure.kl.and_then(|kl| kl.denominator);
        let own = spec.entropy_averaging.filter(|_| !structure.dentropy);
        let [inverse_temperature, logp_inverse_temperature] = [Number::Rate, Number::LogpRate].map(of_kernels);
        let inverse_temperature = (structure.temperature != Temperature::Given).then_some(inverse_temperature);
        Ok(Self {
            inverse_temperature,
            logp_inverse_temperature,
            rate: transform::rate(spec),
            two_softmaxes: structure.temperature == Temperature::Logp,
            couples_rows: structure.couples_rows(),
            inputs: structure.inputs().into_iter().map(Input::name).collect(),
            has_kl: structure.kl.is_some(),
            policy: divisor(
                structure.denominator,
                Some(spec.averaging()),
                Number::Denominator,
                Number::DenominatorEpsilon,
            ),
            kl: kl
                .map(|kl| divisor(kl, Some(spec.kl_averaging()), Number::KlDenominator, Number::KlDenominatorEpsilon)),
            entropy: structure
                .entropy_bonus
                .map(|bonus| divisor(bonus, own, Number::EntropyDenominator, Number::EntropyDenominatorEpsilon)),
            entropy_coef: number(Number::EntropyCoef),
            softmax: softmax(
                structure,
                inverse_temperature,
                logp_inverse_temperature,
                of_kernels(Number::InverseTemperature),
            ),
            loss: token_losses(loss, extents),
        })
    }
}

/// Which rows a mean is over, where they are counted in the batch.
fn rows(reduction: Reduction) -> Option<&'static str> {
    match reduction {
        Reduction::SequenceMean { rows } | Reduction::SequenceSum { rows } | Reduction::FixedLength { rows, .. } => {
            match rows {
                Rows::All => Some("all"),
                Rows::NonEmpty => Some("filled"),
                Rows::Given(_) => None,
            }
        }
        Reduction::TokenMean | Reduction::Normalizer(_) => None,
    }
}

/// From the statistics of whole rows, of logits over their rate; these are multiplied by `of_entropy`, or each token's own where there is
/// none, in the softmax that entropy is of, and by `of_logp` in that of logp.
fn softmax(structure: Structure, of_entropy: Option<f64>, of_logp: f64, inverse_temperature: f64) -> Tape {
    let on = &mut Tape::default();
    let [max, target_logit] = ["max", "target_logit"].map(|name| on.input(name));
    let constant = |on: &mut Tape, x: f64| (x != 1.0).then(|| on.constant(x));
    let of_entropy = match of_entropy {
        Some(x) => constant(on, x),
        None => Some(on.input(Input::Rate.name())),
    };
    let of_logp = constant(on, of_logp);
    let end = |on: &mut Tape, [others, weighted]: [&str; 2], inverse| {
        let [others, weighted] = [others, weighted].map(|name| on.input(name));
        Sums { max, target_logit, others, weighted }.softmax(on, inverse)
    };
    let of_entropy = end(on, ["others", "weighted"], of_entropy);
    let two = structure.temperature == Temperature::Logp;
    let of_logp = if two { end(on, ["logp_others", "logp_weighted"], of_logp) } else { of_entropy };
    let logp = of_logp.logp(on);
    let logp = if two {
        let inverse_temperature = on.constant(inverse_temperature);
        on.mul(logp, inverse_temperature)
    } else {
        logp
    };
    let entropy = of_entropy.entropy(on);
    on.output("logp", logp);
    on.output("entropy", entropy);
    on.output("sum", of_logp.sum);
    on.output("others", of_logp.others);
    on.output("entropy_sum", of_entropy.sum);
    on.output("mean_gap", of_entropy.mean_gap);
    std::mem::take(on)
}

/// With `c` the weights of the policy term, `x` the tokens' own log-ratios, `f` their losses and `n` the tokens of the row:
///
/// ```text
/// token            w_t = x_t               G_t = c_t (∂f_t/∂ℓ + x′_t ∂f_t/∂w)
/// sequence_token   w   = Σ x / (n + ε)     G_t = c_t (∂f_t/∂ℓ + ∂f_t/∂w)
/// sequence         w   = Σ x / (n + ε)     G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w / (n + ε)
/// sequence_product w   = Σ x               G_t = c_t ∂f_t/∂ℓ + x′_t Σ_u c_u ∂f_u/∂w
/// ```
fn token_losses(Shaped { spec, structure }: Shaped, extents: [usize; 2]) -> Tape {
    let on = &mut Tape::default();
    let [logp, advantage, weight] = ["logp", "advantages", "weight"].map(|name| on.input(name));
    let inputs: Vec<(Input, usize)> =
        structure.inputs().into_iter().map(|input| (input, on.input(input.name()))).collect();
    let input = |wanted: Input| inputs.iter().find(|(input, _)| *input == wanted).map(|(_, value)| *value);
    let numbers: Vec<(Number, usize)> =
        structure.numbers().into_iter().map(|number| (number, on.constant(number.of(spec, extents)))).collect();
    let numbers = Numbers::new(numbers);
    let old_logp = input(Input::OldLogp).unwrap_or(logp);
    let own = own_log_ratio(on, structure, &numbers, [logp, old_logp, advantage]);
    let count = matches!(structure.level, RatioLevel::Sequence | RatioLevel::SequenceToken).then(|| {
        let count = on.input("row_count");
        on.add(count, numbers.get(Number::RatioEpsilon))
    });
    let over_count = |on: &mut Tape, sum: usize| count.map_or(sum, |count| on.div(sum, count));
    let log_ratio = if structure.level == RatioLevel::Token {
        own.value
    } else {
        let total = on.row_sum(own.value);
        over_count(on, total)
    };
    let log_weight = input(Input::LogWeight).map(|of_sampler| {
        let x = on.sub(logp, old_logp);
        let [least, most] = [-20.0, 20.0].map(|bound| on.constant(bound));
        let (below, above) = (on.less(x, least), on.less(most, x));
        let x = on.select(below, least, x);
        let x = on.select(above, most, x);
        let of_tokens = on.row_sum(x);
        on.add(of_tokens, of_sampler)
    });
    let on_policy = input(Input::Behaviour).map(|behaviour| {
        let zero = on.constant(0.0);
        let scored = on.equal(behaviour, behaviour);
        let fallen = on.sub(behaviour, logp);
        let fallen = on.select(scored, fallen, zero);
        let (total, count) = (on.row_sum(fallen), on.input("row_count"));
        let mean = on.div(total, count);
        let threshold = numbers.get(Number::OffPolicyThreshold);
        let (below, at) = (on.less(mean, threshold), on.equal(mean, threshold));
        let near = on.or(below, at);
        let (positive, idle) = (on.less(zero, advantage), on.equal(zero, advantage));
        let gains = on.or(positive, idle);
        on.or(gains, near)
    });
    let token = Token {
        logp,
        old_logp,
        advantage,
        log_ratio,
        own,
        ref_logp: input(Input::RefLogp),
        rollout_logp: input(Input::RolloutLogp),
        policy_weight: input(Input::PolicyWeight),
        kl_weight: input(Input::KlWeight),
        kl_share: structure.kl_share().then(|| on.input("kl_share")),
        selected: input(Input::Selected),
        log_weight,
        on_policy,
    };
    let token = token_loss(on, structure, &numbers, &token);
    let grad = match structure.level {
        RatioLevel::Sequence | RatioLevel::SequenceProduct => {
            let at_first_hand = token.by_logp.map(|slope| on.mul(weight, slope));
            let through_ratio = token.by_log_ratio.map(|slope| {
                let owed = on.mul(weight, slope);
                let owed = on.row_sum(owed);
                let owed = over_count(on, owed);
                unless(on, own.held, owed)
            });
            sum(on, at_first_hand, through_ratio)
        }
        RatioLevel::SequenceToken => {
            let slope = sum(on, token.by_logp, token.by_log_ratio);
            on.mul(weight, slope)
        }
        RatioLevel::Token => {
            let slope = token.grad(on, own);
            on.mul(weight, slope)
        }
    };
    on.output("token_loss", token.loss);
    on.output("reduced", token.reduced);
    on.output("ratio", token.ratio);
    let kl = token.kl.unwrap_or_else(|| on.constant(0.0));
    on.output("kl", kl);
    on.output("clipped_low", token.clipped_low);
    on.output("clipped_high", token.clipped_high);
    on.output("grad_logp", grad);
    std::mem::take(on)
}
