use assay::{
    implementation::Implementation,
    problem::*,
    spec::*,
    xla::{ANY_DEVICE, Xla},
};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let all = Xla::all(None);
    let x = all.iter().find(|x| x.id() == a[1]).unwrap();
    let mut spec = LossSpec::default();
    if a.len() > 5 {
        spec.kl = Some(Kl { beta: 0.1, estimator: KlEstimator::K3 });
        spec.entropy_coef = 0.01;
        spec.temperature = 0.7;
    }
    if a.len() > 6 {
        spec.temperature_divides = TemperatureDivides::Logp;
    }
    print!(
        "{}",
        x.program_for(
            &spec,
            a[2].parse::<Shape>().unwrap(),
            a[3].parse::<Dtype>().unwrap(),
            a[4].parse().unwrap(),
            ANY_DEVICE
        )
        .unwrap()
    );
}
