use assay::runtime::*;
use std::{env, fs};
fn main() {
    let a: Vec<String> = env::args().collect();
    let p = Plugin::load(std::path::Path::new(".plugins/libtpu.so")).unwrap();
    let t = match Topology::named(p, &a[1]) {
        Ok(t) => t,
        Err(e) => {
            println!("TOPO ERR {e}");
            return;
        }
    };
    println!("TOPO {:?}", t);
    if a.len() > 2 {
        let code = fs::read(&a[2]).unwrap();
        let n = if a.len() > 3 { a[3].parse().unwrap() } else { t.device_count() };
        let s = std::time::Instant::now();
        match t.compile(&Program::replicated(&code, n)) {
            Ok(u) => println!("MEM {:?} {:?}", u.memory(), s.elapsed()),
            Err(e) => println!("COMPILE ERR {e}"),
        }
    }
}
