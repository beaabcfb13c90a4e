//! Argument structs that grow from version to version.
#![allow(unsafe_code, reason = "the C API's pointers")]

use std::ptr;

use assay::runtime::abi::{ROOM, with_room};

/// A struct that a newer plugin would take: two fields longer than the caller's.
#[repr(C)]
struct Grown {
    struct_size: usize,
    given: usize,
    answered: usize,
    added: usize,
}

#[test]
fn abi_struct_is_followed_by_zeros_and_its_answer_returns() {
    let mut args = Grown { struct_size: 24, given: 7, answered: 0, added: 99 };
    // SAFETY: `args` begins with its size and is longer than that.
    unsafe {
        with_room(ptr::from_mut(&mut args).cast(), |roomy| {
            let roomy = roomy.cast::<Grown>();
            assert_eq!((*roomy).struct_size, ROOM);
            assert_eq!((*roomy).given, 7);
            assert_eq!((*roomy).added, 0, "what lies behind the caller's struct is not read");
            (*roomy).answered = 5;
            (*roomy).added = 6;
        });
    }
    assert_eq!((args.struct_size, args.given, args.answered), (24, 7, 5));
    assert_eq!(args.added, 99, "what lies behind the caller's struct is not written");
}
