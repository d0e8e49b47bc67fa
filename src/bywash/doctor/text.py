"""The report for a person: the checks, then what is wrong, gravest first and alike together, then the variables."""

from bywash.doctor.finding import Finding, Report, Severity, Variable


def report_text(report: Report) -> str:
    """Plain text, no colour; lines are as long as they must be, since commands are to be copied."""
    lines = [f"{report.origin}: {report.headline}", ""]
    lines += [f"  {result.status:<8} {result.title}" for result in report.results if result.skipped is None]
    for reason in dict.fromkeys(result.skipped for result in report.results if result.skipped):
        titles = "; ".join(result.title for result in report.results if result.skipped == reason)
        lines.append(f"  not applicable, {reason}: {titles}")
    for severity in Severity:
        graded = [finding for finding in report.findings if finding.severity is severity]
        for code in dict.fromkeys(finding.code for finding in graded):
            lines += ["", *_alike(code, [finding for finding in graded if finding.code == code])]
    if report.variables:
        lines += ["", "Variables for NCCL and NVSHMEM on this host"]
        lines += [_variable(variable) for variable in report.variables]
    return "\n".join(lines)


def _alike(code: str, findings: list[Finding]) -> list[str]:
    """Findings of one code: each place with what was found there; reason and remedy once where they are the same."""
    lines = [f"{findings[0].severity.upper()} {code}"]
    one_why = len({finding.why for finding in findings}) == 1
    one_fix = len({finding.fix for finding in findings}) == 1
    for finding in findings:
        lines.append(f"  {finding.where}: {finding.what}")
        lines += [] if one_why else [f"    why: {finding.why}"]
        lines += [] if one_fix or not finding.fix else [f"    fix: {finding.fix}"]
    lines += [f"  why: {findings[0].why}"] if one_why else []
    return lines + ([f"  fix: {findings[0].fix}"] if one_fix and findings[0].fix else [])


def _variable(variable: Variable) -> str:
    wanted = f"{variable.name}={variable.recommended}" if variable.recommended is not None else f"{variable.name} unset"
    same = variable.in_force == variable.recommended
    now = "" if same else f"; now {'unset' if variable.in_force is None else variable.in_force}"
    return f"  {wanted}{now}\n    {variable.why}"
