use assay_ptx_interpreter::{Buffer, Launch, Module, Units};

const COPY: &str = r"
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b) .reqnctapercluster 2, 1, 1
{
    .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .pred %p;
    .shared .align 16 .b8 buf[256];
    ld.param.u64 %rd0, [a];
    ld.param.u64 %rd1, [b];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %cluster_ctarank;
    mad.lo.u32 %r2, %r1, 64, %r0;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd0, %rd0, %rd2;
    add.u64 %rd1, %rd1, %rd2;
    shl.b32 %r3, %r0, 2;
    mov.u32 %r4, buf;
    add.u32 %r3, %r3, %r4;
    cp.async.ca.shared.global [%r3], [%rd0], 4;
    cp.async.commit_group;
    cp.async.wait_group 0;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    xor.b32 %r5, %r1, 1;
    mapa.shared::cluster.u32 %r6, %r3, %r5;
    ld.shared::cluster.b32 %r7, [%r6];
    st.global.b32 [%rd1], %r7;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ret;
}
";

#[test]
fn smoke() {
    let module = Module::parse(COPY).unwrap();
    let launch = Launch { grid: [2, 1, 1], block: [64, 1, 1], cluster: [2, 1, 1], dynamic_shared: 0 };
    let bytes: Vec<u8> = (0..512).map(|i| (i % 251) as u8).collect();
    let out = module.run_both("k", &launch, vec![Buffer::input("a", bytes.clone()), Buffer::output("b", 512)], &[0, 1], Units::Rounded, 1).unwrap();
    assert_eq!(out[1].bytes[..256], bytes[256..]);
}
