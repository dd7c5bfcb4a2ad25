//! The types of `cubecl-llvm` that `cubecl-cuda` names, without LLVM.
//!
//! Kernels are compiled through NVRTC; reaching [`PlironCompiler::compile`] is a configuration mistake
//! and is answered with an error that says so.

use cubecl_core::ir::nvidia::SmArch;
use cubecl_core::prelude::KernelDefinition;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::compiler::{CompilationError, Compiler};
use cubecl_runtime::kernel::BufferIOAttr;

/// Names under which the original crate keeps its PTX version.
pub mod nvptx {
    /// The PTX version that a driver loads.
    pub mod ptx_version {
        /// A PTX version; never constructed here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum PtxVersion {}

        impl PtxVersion {
            /// No version: NVRTC writes its own.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl core::fmt::Display for PtxVersion {
            fn fmt(&self, _: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match *self {}
            }
        }
    }
}

/// Names under which the original crate narrows device features.
pub mod shared {
    /// Feature narrowing.
    pub mod lowered_features {
        /// Targets of the code generator.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            /// NVIDIA.
            Nvptx,
        }

        /// Changes nothing: only called when the LLVM back end is selected.
        pub fn restrict_features<T>(_properties: &mut T, _target: GpuTarget) {}
    }
}

/// Targets of the code generator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    /// Host code.
    #[default]
    Cpu,
    /// NVIDIA.
    Nvptx,
}

/// The compiler that is not here.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    /// What it would generate for.
    pub target: LlvmTarget,
}

/// Options of the compiler.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    /// AMD architecture.
    pub arch: Option<()>,
    /// NVIDIA architecture.
    pub sm_arch: Option<SmArch>,
    /// PTX version to emit.
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    /// Whether scalars travel in the parameter block.
    pub grid_constants: bool,
}

/// A compiled NVIDIA kernel; never constructed here.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    /// NUL-terminated PTX.
    pub ptx: Vec<core::ffi::c_char>,
    /// Symbol of the kernel.
    pub entrypoint: String,
    /// Text of the intermediate representation.
    pub ir: String,
    /// Shared memory in bytes.
    pub shared_memory_size: usize,
    /// Access mode of each buffer.
    pub io: Vec<BufferIOAttr>,
}

/// What the compiler returns; never constructed here.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    /// Host code.
    Jit,
    /// An NVIDIA kernel.
    NvptxCode(NvptxModule),
}

impl core::fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("no LLVM in this build")
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &PlironOptions,
    ) -> Result<PlironArtifact, CompilationError> {
        Err(CompilationError::Generic {
            reason: "this build has no LLVM code generator: build cubecl-cuda with its `cpp` feature"
                .to_owned(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "none"
    }
}
