//! Small kernels: a body in a frame.

use assay_ptx_interpreter::{ApproximateUnits, GlobalArray, GridLaunch, PtxFault, PtxInterpretError, PtxModule};

/// A kernel of two arrays, `a` at `%rd0` and `b` at `%rd1`; `%r0` is the thread, `%r1` the CTA's rank, `%r2` the place of
/// `room`, 256 bytes of shared memory, and `%rd2` four times the thread of the grid.
pub(crate) fn text(cluster: u32, body: &str) -> String {
    format!(
        ".version 8.0
.target sm_90
.address_size 64
.visible .entry small(.param .u64 a, .param .u64 b)
.explicitcluster
.reqnctapercluster {cluster}, 1, 1
{{
    .reg .pred %p<8>;
    .reg .b16 %h<8>;
    .reg .b32 %r<32>;
    .reg .b64 %rd<16>;
    .reg .f32 %f<16>;
    .shared .align 16 .b8 room[256];
    ld.param.u64 %rd0, [a];
    ld.param.u64 %rd1, [b];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r2, room;
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mad.lo.u32 %r3, %r3, %r4, %r0;
    mul.wide.u32 %rd2, %r3, 4;
{body}
    ret;
}}
"
    )
}

/// A launch of `ctas` CTAs of `threads`, in clusters of `cluster`.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) ctas: u32,
    pub(crate) threads: u32,
    pub(crate) cluster: u32,
}

pub(crate) const WARP: Shape = Shape { ctas: 1, threads: 32, cluster: 1 };
pub(crate) const CTA: Shape = Shape { ctas: 1, threads: 64, cluster: 1 };
pub(crate) const PAIR: Shape = Shape { ctas: 2, threads: 32, cluster: 2 };
pub(crate) const APART: Shape = Shape { ctas: 2, threads: 32, cluster: 1 };

impl Shape {
    pub(crate) fn launch(self) -> GridLaunch {
        let Self { ctas, threads, cluster } = self;
        GridLaunch { grid: [ctas, 1, 1], block: [threads, 1, 1], cluster: [cluster, 1, 1], dynamic_shared: 0 }
    }

    /// The words that are in `b` after `body` ran on words `a` of 0, 1, 2 … and a `b` for each thread.
    pub(crate) fn run(self, body: &str) -> Result<Vec<u32>, PtxInterpretError> {
        self.run_late(body, 0)
    }

    /// Runs `body` like [`run`](Self::run), but on arrays that begin `late` bytes late.
    pub(crate) fn run_late(self, body: &str, late: u32) -> Result<Vec<u32>, PtxInterpretError> {
        let words = self.ctas * self.threads;
        let a = (0..words).flat_map(u32::to_le_bytes).collect();
        let buffers =
            vec![GlobalArray::input("a", a).late(late), GlobalArray::output("b", 4 * words as usize).late(late)];
        let module = PtxModule::parse(&text(self.cluster, body))?;
        let out = module.run_both("small", &self.launch(), buffers, &[0, 1], ApproximateUnits::Rounded, 1)?;
        Ok(out[1].bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect())
    }

    pub(crate) fn found(self, body: &str) -> (PtxFault, String) {
        match self.run(body) {
            Err(PtxInterpretError::Fault { fault, problem, .. }) => (fault, problem),
            other => panic!("{body}\n{other:?}"),
        }
    }
}
