"""Columns, numbers and words that cannot identify a person; pseudonymous catalogs and shared pages show no others.

A value passes if its column is known and the value has the column's form: a number in a plausible range, or words of
the vocabulary below. Nothing is forbidden by a list: a column or word that nobody thought of is withheld.
"""

import re
from collections.abc import Callable

from octfm.catalog.participants.splits import parse_split


def vocabulary(text: str) -> frozenset[str]:
    """The set of words in a text."""
    return frozenset(text.split())


OLDEST = 90
"""Ages above 89 identify (HIPAA safe harbour, 45 CFR 164.514(b)(2)(i)(C)): 90 stands for 90 and older."""

NUMBERS: dict[str, tuple[float, float]] = {
    "bmi": (8, 90), "hba1c": (3, 20), "hba1c_percent": (3, 20), "hba1c_mmol_mol": (9, 200), "systolic": (50, 280),
    "diastolic": (20, 180), "diabetes_duration": (0, 89), "diabetes_duration_years": (0, 89), "severity": (0, 100),
    "iop": (0, 80), "iop_mmhg": (0, 80), "axial_length": (14, 40), "axial_length_mm": (14, 40),
    "cst": (50, 1500), "cst_um": (50, 1500), "central_thickness_um": (50, 1500), "rnfl_um": (10, 400),
    "rnfl_thickness_um": (10, 400), "cup_disc_ratio": (0, 1), "mean_deviation": (-40, 20),
    "logmar": (-0.5, 4), "bcva": (-0.5, 100), "bcva_logmar": (-0.5, 4), "bcva_letters": (0, 100),
    "etdrs_letters": (0, 100), "visual_acuity": (-0.5, 4), "refraction": (-40, 30), "spherical_equivalent": (-40, 30),
    # Of a table of octfm segment.
    "centre_um": (50, 1500), "volume_mm3": (1, 50),
    **{
        f"{ring}_{side}_um": (50, 1500)
        for ring in ("inner", "outer")
        for side in ("superior", "nasal", "inferior", "temporal", "left", "right")
    },
    **{f"{area}_nl": (0, 9999) for area in ("intraretinal_fluid", "subretinal_fluid", "drusen", "detachment")},
}  # fmt: skip
"""Measurement -> range of plausible values."""
AGES = frozenset({"age", "age_years", "age_at_visit", "age_at_scan", "age_at_exam", "age_at_baseline"})
DATES = vocabulary("""
    acquisition_date baseline_date exam_date examination_date follow_up_date followup_date scan_date study_date
    study_visit_date visit visit_date
""")
"""Columns whose dates pass after shifting. Dates of birth and death are never among them."""
SPLITS = frozenset({"recommended_split", "split"})
SITES = frozenset({"clinical_site", "site", "study_site", "center", "centre"})
PUBLIC_SITES = frozenset({"UW", "UAB", "UCSD"})
"""The sites of AI-READI."""
SEXES = frozenset({"sex", "gender"})
ORIGINS = frozenset({"race", "ethnicity"})
FLAGS = vocabulary("""
    cardiac_ecg cataract clinical_data confident diabetes dilated environment hypertension phakic pseudophakic
    retinal_flio retinal_oct retinal_octa retinal_photography smoker smoking treated wearable_activity_monitor
    wearable_blood_glucose
""")
"""Columns of yes and no: AI-READI's modalities, and common ones."""
CATEGORIES = vocabulary("""
    amd amd_grade amd_stage arm atrophy cohort condition control diabetes diabetes_status diabetes_type
    diagnosis disease dme dme_grade dr dr_grade dr_level dr_stage drusen eye eye_diagnosis fluid glaucoma
    glaucoma_stage grade group hypertension image_quality irf laterality lens lens_status macular_hole ped
    quality retinal_diagnosis severity side smoking smoking_status srf stage study_arm study_group visit_number
""")
"""Columns of categories, grades and diagnoses."""

_YES_NO = frozenset(["true", "false", "yes", "no", "y", "n", "0", "1"])
_SEX_WORDS = vocabulary("""
    d diverse f female intersex m male man men not other reported stated u unknown woman women x
""")
_ORIGIN_WORDS = vocabulary("""
    african alaska american and answer asian black caucasian decline declined east eastern european hawaiian
    hispanic indian islander latina latino latinx middle mixed more multiracial native non north not of one or
    other pacific prefer races reported south stated than to two unknown white
""")
_WORDS = vocabulary("""
    1b 2b a ab absence absent acceptable active acuity acute advanced affected age aged all am amd an anaemia
    and angle anterior anti any aphakic arm armd arteritic artery asymptomatic at atrophic atrophy b background
    bad baseline bdr benign bilateral bleed blood blurred border borderline branch brao brvo c cad case cataract
    cataracts category cell cellophane center central centre chorioretinal chorioretinopathy choroid choroidal
    choroideremia choroiditis chronic ci class classic clear closed closure cme cmo cnv cnvm cohort complete
    complication complications cone confluent control controlled controls convergent corneal cr crao crvo csc
    cscr csr cst current cystic cystoid d degeneration degenerative dependent deposits detached detachment
    diabetes diabetic diet diffuse dilated disc disciform disease diseased disk disorder dm dm1 dm2 dme dmo dr
    drug druse drusen dry dysplasia dystrophy e early eccentric ectopia edema elevated ell else emmetropic
    endophthalmitis epiretinal erm eruptive ex exam excellent excluded extensive extra extrafoveal exudate
    exudates exudation exudative eye eyes ez f fail fair false fellow fibrosis fibrotic fine first fluid focal
    follow followup former fovea foveal foveoschisis full ga gdm geographic gestational glaucoma glaucomatous
    good gradable grade group haemorrhage haemorrhages hard has haze healthy hemorrhage hemorrhages high hole
    hydroxychloroquine hyperopia hyperopic hypertension hypertensive hypotony iamd iatrogenic idiopathic if ii
    iii inactive incident incomplete indeterminate infectious inflammation inflammatory injectable injected
    injection inner insufficient insulin intermediate intraretinal involvement involving iol iop irf ischaemic
    ischemia ischemic iv juvenile juxtafoveal keratoconus l lamellar laser late latent layer left lens lesion
    lesions level lifestyle limited loss low lower m mac macroaneurysm mactel macula maculae macular maculopathy
    mainly major medication mel membrane metastatic mh middle mild minimal minor missing mixed mnv moderate
    moderately more movement multifocal myopia myopic na naevus naion naive namd nasal nci nd neither
    neovascular neovascularisation neovascularization nerve neuritis neuropathy never nevus no non nonarteritic
    none nonexudative nonproliferative normal not npdr ntg nuclear occlusion ocular od oedema of oht old on one
    open operated optic or ora oral os other out outer pachychoroid papilledema papilloedema paracentral
    parafoveal partial pass pathologic pathological pathology patient patients pcv pdr ped peripheral persistent
    phakic pigment pigmentary pigmented pigmentosa placebo plaque poag polypoidal poor post posterior
    postoperative pre prediabetes prediabetic preoperative preretinal present primary proliferative prp
    pseudoexfoliation pseudohole pseudophakia pseudophakic punctate pvd pvr quiescent r rao rap recurrent
    refractory remission resolved reticular retina retinae retinal retinitis retinopathy retinoschisis
    rhegmatogenous right risk rod rp rpe rubeosis rvo sarcoid scar scarring schisis second secondary sector
    senile serous severe severely severity sham sickle sided sirs smoker soft srf stable stage status subfoveal
    subretinal suspect suspected suspicion symptomatic syphilis t1d t1dm t2d t2dm tear telangiectasia temporal
    thickened thickening thin thinning third toxic toxicity traction tractional traumatic treated treatment true
    type uncontrolled under undetermined ungradable unknown untreated unusable upper usable uveitic uveitis
    vascular vasculitis vegf vein venous very vf visible vision visual vitelliform vitreomacular vitreoretinal
    vitreous vma vmt wet with without x y yes
""")
_SCANNER_WORDS = vocabulary("""
    1 100 1000 130 1f 1r 2 2000 3000 330 3d 3doct 400 4000 400k 500 5000 600 6000 800 9000 a1 advance ag
    angiovue anterion atlantis avanti bioptigen bm c2200 c2300 canon carl casia2 cirrus clarus copernicus domain
    dri elite engineering envisu eyekon flex glauvas hd heidelberg held hoct hra hra2 hs huvitz ii inc intalight
    ivue ivue100 leica lite maestro maestro2 mark meditec mirante monaco nidek nx oct oct1 oct2 octfm optopol
    optos optovue out phantom photo plex plus revo rs rtvue rtvue100 s1 sd silverstone solix source spectral
    spectralis ss stratus svision swept synthetic tomey topcon towardpi triton unknown visionix widefield
    xephilio xr zeiss
""")
_PROTOCOL_WORDS = vocabulary("""
    2d 3d analysis angio angiography anterior art b bscan center centered central centre centred choroid
    choroidal circle circular cirrus combined combo corrected cross cube custom default deg degree degrees dense
    depth detail disc disk edi en enface enhanced eye face fast field fixation follow followup fovea foveal
    ganglion gca gcc gcl glaucoma h hd head held high horizontal hr hs imaging inferior left line lines mac
    macula maculaire macular maestro maestro2 map mm motion nasal nerve nfl oct octa od onh optic os ou out pole
    posterior ppol preset protocol radial raster raw rc region report resolution retina retinal right rnfl scan
    scans sd section sections segment single smart spectralis speed ss standard star structural superior
    temporal thickness triton um unknown up v vertical vol volume wide widefield x
""")
_ICD_10 = re.compile(r"[A-TV-Z]\d{2}(\.\d{1,4}[A-Z]?)?")
_NUMBER = re.compile(r"[-+]?\d{1,4}(\.\d{1,6})?")
_PLAIN = re.compile(r"[A-Za-z0-9 _\-/;,.+()%&:<>=]*")
_DIMENSIONS = re.compile(r"\d{1,4}x\d{1,4}(x\d{1,4})?(mm|deg)?|\d{1,2}(mm|deg)")


def meaning(column: str) -> str:
    """A column's name in the spelling of the sets above."""
    return re.sub(r"[ _-]+", "_", column.strip().lower())


def is_known(column: str) -> bool:
    """Whether values of this column can pass."""
    name = meaning(column)
    return name in NUMBERS or any(
        name in known for known in (AGES, DATES, SPLITS, SITES, SEXES, ORIGINS, FLAGS, CATEGORIES)
    )


def safe_value(column: str, value: str) -> str | None:
    """The value as it may be shown to anyone; None unless known to be safe, also for dates and all but public sites."""
    name, value = meaning(column), value.strip()
    if name in AGES:
        return _age(value)
    if name in SPLITS:
        return parse_split(value)
    if name in SITES:
        return value if value in PUBLIC_SITES else None
    for columns, words in ((SEXES, _SEX_WORDS), (ORIGINS, _ORIGIN_WORDS)):
        if name in columns:
            return value if _PLAIN.fullmatch(value) and set(_tokens(value)) <= words else None
    if name in NUMBERS and _NUMBER.fullmatch(value) and NUMBERS[name][0] <= float(value) <= NUMBERS[name][1]:
        return value
    if name in FLAGS and value.lower() in _YES_NO:
        return value
    return value if name in CATEGORIES and is_plain_word(value) else None


def is_plain_word(value: str) -> bool:
    """Whether a category, class or column name has only the field's words, at most one small number and one letter."""
    if not _PLAIN.fullmatch(value):
        return False
    # Codes of ICD-10, several of them separated by semicolons, are diagnoses.
    parts = [part.strip() for part in value.split(";")]
    if all(_ICD_10.fullmatch(part) for part in parts):
        return True
    tokens = [token for token in _tokens(value) if not _ICD_10.fullmatch(token.upper())]
    numbers = [token for token in tokens if token.isdigit()]
    words = [token for token in tokens if not token.isdigit()]
    return (
        all(token in _WORDS for token in words)
        and sum(len(token) == 1 for token in words) <= 1
        # One number is a grade; several could be a date, one above OLDEST an age, and patient 12 a person.
        and len(numbers) <= 1
        and not (numbers and {"case", "patient", "patients"} & set(words))
        and all(len(token) <= 2 and int(token) <= OLDEST for token in numbers)
    )


def is_known_name(name: str) -> bool:
    """Whether the name of a column, or of a target derived from one (column:label), may be shown."""
    derived = ("disease", "scanner", "label")
    return all(is_known(part) or part in derived or is_plain_word(part) for part in name.split(":"))


def is_known_class(name: str) -> bool:
    """Whether a value of a label column may be shown."""
    return is_plain_word(name) or is_known_scanner(name)


def is_known_scanner(scanner: str) -> bool:
    return set(scanner.split("_")) <= _SCANNER_WORDS


def is_known_protocol(protocol: str) -> bool:
    tokens = protocol.split("_")
    numbers = [token for token in tokens if token.isdigit()]
    words = [token for token in tokens if not (token.isdigit() or _DIMENSIONS.fullmatch(token))]
    # At most three digits: more could be a date or the number of a patient.
    return all(token in _PROTOCOL_WORDS for token in words) and len("".join(numbers)) <= 3


def numbered(kind: str) -> Callable[[str], str]:
    """A function that names values other_KIND_1, other_KIND_2, ... in the order of its calls."""
    names: dict[str, str] = {}
    return lambda value: names.setdefault(value, f"other_{kind}_{len(names) + 1}")


def _age(value: str) -> str | None:
    """Age in whole years: fractions at several visits would reveal the birthday."""
    if not re.fullmatch(r"\d{1,3}(\.\d+)?", value) or float(value) > 120:
        return None
    return str(min(int(float(value)), OLDEST))


def _tokens(value: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", value.lower())
